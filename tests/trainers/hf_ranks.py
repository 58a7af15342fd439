"""One rank of a training with Trainer or with an Accelerator; `launch` starts them, over gloo.

python -m tests.trainers.hf_ranks trainer|accelerate FOLDER CONFIG-OR-EMPTY SETTINGS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..support.ports import free_port
from ..support.warm import interpreter

ROOT = Path(__file__).parents[2]
NUM_STEPS = 3
GLOBAL_BATCH = 4
MAX_NORM = 0.5
IMPORTS = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")


def launch(folder: Path, mode: str, world: int, config: dict[str, Any] | None, **settings: Any) -> list[dict[str, Any]]:
    """Train with `world` processes; config None: without Sentinel. Returns what each rank says."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    port = free_port()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SENTINEL_", "ACCELERATE_", "FSDP_", "TORCHELASTIC"))}
    command = [interpreter(*IMPORTS), "-m", "tests.trainers.hf_ranks", mode, str(folder)]
    command += [json.dumps(config) if config is not None else "", json.dumps(settings)]
    ranks = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        environment = {
            **clean, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "SENTINEL_DIR": str(folder), "SENTINEL_RUN": "run", "ACCELERATE_USE_CPU": "true",
            "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        if world > 1:
            environment.update({name: str(value) for name, value in place.items()})
        ranks.append(subprocess.Popen(
            command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ))  # fmt: skip
    ended = [(process.communicate(timeout=180), process.returncode) for process in ranks]
    for (_, stderr), code in ended:
        assert code == settings.get("exit_code", 0), stderr[-4000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(world)]


def _trainer(folder: Path, config: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, float], dict[str, float]]:
    from transformers import Trainer, TrainingArguments

    import sentinel
    from tests.trainers import hf_models

    world = int(os.environ.get("WORLD_SIZE", "1"))
    data = hf_models.causal_data(32)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=NUM_STEPS, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=GLOBAL_BATCH // world, save_strategy="no", max_grad_norm=MAX_NORM, learning_rate=1e-2,
        ddp_backend="gloo" if world > 1 else None, optim="adamw_torch", **settings,
    )  # fmt: skip
    callbacks = [sentinel.HuggingFaceCallback(config)] if config is not None else []
    trainer = Trainer(hf_models.llama(), arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return (
        trainer.model,
        {line["step"]: line["loss"] for line in lines},
        {line["step"]: line["grad_norm"] for line in lines},
    )


def _accelerate(folder: Path, config: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, float], dict[str, float]]:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    import sentinel
    from tests.trainers import hf_models

    accumulation = settings.get("gradient_accumulation_steps", 1)
    sharding = {}
    if "deepspeed" in settings:
        from accelerate import DeepSpeedPlugin

        stage = settings["deepspeed"]["zero_optimization"]["stage"]
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=accumulation, gradient_clipping=MAX_NORM)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
        plugin.set_mixed_precision("no")
        sharding = {"deepspeed_plugin": plugin}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **sharding)
    data = [torch.tensor(one["input_ids"]) for one in hf_models.causal_data(64)]
    model = hf_models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if config is not None:
        sentinel.attach_accelerate(accelerator, model, optimizer, config, first_step=1)
    losses, norms, step, total = {}, {}, 1, 0.0
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            total += float(accelerator.gather(loss.detach()).mean()) / accumulation
            if accelerator.sync_gradients:
                norms[step] = float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses[step], total = total, 0.0
            accelerator.log({"loss": losses[step]}, step=step)
            step += 1
            if step > NUM_STEPS:
                break
    return model, losses, norms


def main() -> None:
    mode, folder, config, settings = sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    train = {"trainer": _trainer, "accelerate": _accelerate}[mode]
    model, losses, norms = train(folder, json.loads(config) if config else None, settings)
    weights = 0.0
    for at, param in enumerate(model.parameters()):
        local = getattr(param, "_local_tensor", param).detach().double().flatten()
        weights += float((local * torch.arange(1, local.numel() + 1)).sum()) * (1 + at)
    collectives = int(dist.group.WORLD._get_sequence_number_for_group()) if dist.is_initialized() else 0
    result = {"losses": losses, "norms": norms, "weights": weights, "collectives": collectives}
    (folder / f"result-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
