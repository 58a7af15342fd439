"""The checksum of TensorBoard's records is TensorBoard's own."""

from __future__ import annotations

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs

from sentinel.crc32c import masked_crc32c


@pytest.mark.parametrize("size", [0, 1, 8, 1000, 4095, 4096, 4097, 8192, 8193, 50_000])
def test_it_is_that_of_tensorboard(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()

    assert masked_crc32c(data) == int(theirs(data))
    assert masked_crc32c(data[: size // 2] + b"x") != masked_crc32c(data[: size // 2] + b"y")
