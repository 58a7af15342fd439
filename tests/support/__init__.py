"""What tests of several folders share, one module for each thing that it holds.

| to | take |
|---|---|
| make an anomaly or an incident | `anomalies`: `a_nan`, `an_excursion`, `an_incident`, each with the fields that differ |
| write a run that nobody trained, and judge it | `serving`: `small_run`, `served`, `catch_up`, `judge_run` |
| write one whose names and values are hostile | `hostile_run`: `write_hostile_run`, `EVIL` |
| write one whose ranks recorded vectors of experts and heads | `expert_run`: `expert_run`, `write_with_vectors` |
| write one of many ranks, values, tensors or incidents | `large_run`: `write_wide_run`, `write_deep_run` |
| read back what a judge wrote | `results`: `anomalies`, `revisions`, `incidents`, `decisions`, `result_bytes` |
| read back what `sentinel export` prints | `exported`: `exported_rows`, `strict_json` |
| get the steps of a run as a daemon closes them | `closed_steps`: `closed_steps`, `statistics`, `FollowedRun` |
| have a step whole, as the spools of its ranks have it | `recorded_step`: `read_step` |
| drive a detector over series | `series`: `scores_of`, `first_anomalous`, `autoregressive` |
| build a model of milliseconds, with its data | `nets`: `TinyModel`, `Recomputing`, `tokens`, `loss_of`, `weights_of` |
| train it for some steps | `training`: `train_steps` |
| read back what ranks wrote into their spools | `spools`: `Said` by name, `SaidSoFar` while one writes, `decoded` frames |
| compare a row with its tensor | `truth`: `assert_row_of`; `spools`: `norm`; `nets`: `outputs` of modules |
| count how often the host waits for a device | `host_waits`: `HostWaits` |
| run a function on several ranks | `forked`: `start_ranks`; `ports`: `free_port` |
| start a program that needs torch, or a command | `warm`: `interpreter`, `cli` |
| have judged steps that nobody judged | `merged_steps`: `merged_step`, `FlatLayout` |
| judge steps on paper, of norms alone | `paper_run`: `PaperRun`, `plant_nan` |
| see which files a process left open | `open_files`: `open_files` |
| wait until something is so | `waiting`: `wait_for`, `wait_for_words` |
| show what a daemon or a worker shows at a scrape | `snapshots`: `full_run`, `full_snapshot`, `a_worker` |
| have a run of Weights & Biases that its own client wrote | `wandb_run`: `write_wandb_run` |
| have a server of Weights & Biases that its own client takes for one | `wandb_server`: `WandbServer`, which may fail |
| have a rank that traces tensors | `traces`: `TracingRank`, a step at a time |
| serve HTTPS | `certificates`: `write_pair` |
| receive what is sent, or start Prometheus or Alertmanager | `servers`: `Receiver`, `prometheus`, `alertmanager` |
| have a broker that may be killed and lose its messages | `nats_broker`: `NatsBroker`, and `NatsCluster` of three |
| have one in operator mode, with accounts and users by JWT | `nats_operator`: `NatsOperator` |
| act there as one of its users, and hear what is refused | `broker_acts`: `act_as`, `until_refused` |
| have servers and their clients parted, one way or wholly | `partitions`: `ProxiedCluster`, `NamespacedCluster` |
| have a disk that gets full | `small_disk`: `SmallDisk`, for root alone |
| have nodes and joins on it, driven by hand | `fleet_parts`: `Shipper`, `Join`, `recorded_run`, `split` |
| have those of a run on a cluster, and compare what came of it | `watched_run`: `WatchedRun` |
| have a fleet live through faults, in one thread | `fleet_faults`: `RecordedFleet`, `FaultyFleet`, `DigestedFleet` |
| have one with workers live through one | `relayed_faults`: `RelayedFleet` |
| look at the page as a browser shows it | `browser`: `chromium`, `Looked`, which notes what the browser complains of |
| have alerts go through all stages of a sink | `sink_bench`: `SinkBench`, `FakeSink`, by a clock that jumps |
| have a Slack that answers | `slack_server`: `FakeSlack`, in memory and over HTTP |
| have an S3 that counts what it is asked for, Google's or Azure's store | `object_store`: `object_store`, ... |

Synthetic runs, planted faults, a clock and the battery of detectors are in `sentinel.testing`, which others have too.
"""
