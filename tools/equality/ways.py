"""What two processes of this machine have between them, through gloo: `python tools/equality/ways.py [MIB]` prints one JSON document.

The same measurement that Fieldbook makes of two GPUs through NCCL (inventory/nccl_worker.py), with one thread each, in messages of MIB (4).
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lib"))

from fieldbook.inventory import nccl_worker  # noqa: E402

NAMES = {"nccl": "hop_gb_s", "nccl_latency": "hop_us", "nccl_reduce": "all_reduce_gb_s", "nccl_reduce_latency": "all_reduce_us"}


def main(mib: int) -> None:
    import torch

    torch.set_num_threads(1)
    found = {}

    def take(quantity: str, samples: list[float], **told) -> None:
        found[NAMES[quantity]] = {"median": statistics.median(samples), "samples": samples, "bytes": told["size_bytes"]}

    nccl_worker.measure(torch, (0, 1), ("cpu", "cpu"), take, backend="gloo", large_bytes=mib * nccl_worker.MIB)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
