"""What a sample was measured under: clocks, temperatures, power and slowdowns of the GPUs, and what else the machine did."""

import os
import statistics
import threading
from typing import Any

from ..inventory import nvml

EVERY_S = 0.25


class Conditions:
    """A watch over one sample, in a thread of its own; `document` once it has ended. Only the machine that Fieldbook runs on can be watched."""

    def __init__(self, local: bool):
        self._local, self._ended = local, threading.Event()
        self._gpus: dict[int, list[dict[str, Any]]] = {}
        self._thread = None

    def __enter__(self) -> "Conditions":
        self._load = os.getloadavg()[0]
        if self._local and nvml.speeds():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            for gpu in nvml.speeds():
                self._gpus.setdefault(gpu["index"], []).append(gpu)
            if self._ended.wait(EVERY_S):
                return

    def document(self) -> dict[str, Any]:
        """{"load_average": [before, after], "gpus": [...]}; empty for a server on another machine.

        The clocks at start and end are those of the first and last quarter of the looks at a working GPU: an idle one clocks down.
        """
        if not self._local:
            return {}
        return {"load_average": [self._load, os.getloadavg()[0]], "gpus": [_of_gpu(index, looks) for index, looks in sorted(self._gpus.items())]}


def _of_gpu(index: int, looks: list[dict[str, Any]]) -> dict[str, Any]:
    working = [look["sm_clock_mhz"] for look in looks if look["sm_clock_mhz"] and (look["busy_percent"] or 0) >= 50]
    quarter = max(1, len(working) // 4)
    temperatures = [look["temperature_c"] for look in looks if look["temperature_c"] is not None]
    powers = [look["power_w"] for look in looks if look["power_w"] is not None]
    return {
        "index": index,
        "sm_clock_mhz_start": statistics.median(working[:quarter]) if len(working) >= 4 else None,
        "sm_clock_mhz_end": statistics.median(working[-quarter:]) if len(working) >= 4 else None,
        "temperature_c": [temperatures[0], temperatures[-1]] if temperatures else None,
        "power_w_max": max(powers, default=None),
        "power_limit_w": looks[-1]["power_limit_w"],
        "slowed": sorted({reason for look in looks for reason in look["slowed"]}),
        "processes": max((look["processes"] for look in looks if look["processes"] is not None), default=None),
    }
