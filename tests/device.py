"""The device that ranks have in tests: a CPU, or with PIPECOMPILE_TEST_DEVICE=cuda a GPU for all.

NCCL refuses two ranks on one GPU of one host. So each rank says that its host is another one, and
messages go through sockets. Ranks then take turns on the GPU: what they compute is tested, and not
how fast.
"""

from __future__ import annotations

import os

import torch

__all__ = ["BACKEND", "DEVICE", "prepare_rank"]

DEVICE = torch.device(os.environ.get("PIPECOMPILE_TEST_DEVICE", "cpu"))
BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"


def prepare_rank(rank: int) -> None:
    """Prepare this process to be a rank, before it has a process group."""
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}",
            NCCL_SOCKET_IFNAME="lo",
            NCCL_IB_DISABLE="1",
            NCCL_MAX_NCHANNELS="1",  # Groups are then made faster.
            CUBLAS_WORKSPACE_CONFIG=":4096:8",
        )
        torch.cuda.set_device(0)
        # Else sums of one process may differ in their last bits from run to run.
        torch.use_deterministic_algorithms(True)
