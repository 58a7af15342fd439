"""The tags that the Ascend msProbe monitor gives to what it measures: `0:encoder.layers.0.linear1.input:0/rank3/actv`."""

from __future__ import annotations

import re

TAG = re.compile(r"(?:(?P<vpp>\d+):)?(?P<name>.*?)(?:\.?(?P<slot>input|output)(?:_\d+)?)?(?::\d+)?/rank\d+/(?P<metric>\w+)")


def module_of(tag_name: str) -> str:
    """Return the module or parameter that an msProbe tag is about: `encoder.layers.0.linear1`; other names unchanged."""
    tag = TAG.fullmatch(tag_name)
    return (tag["name"] or "model") if tag else tag_name
