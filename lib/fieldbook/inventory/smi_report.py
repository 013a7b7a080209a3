"""The long report of nvidia-smi: `nvidia-smi -q -x` (XML) and `nvidia-smi -q` (text), whole or in pieces such as `-q -d MEMORY`.

Element and line names as drivers 340 to 610 print them; names that changed are listed together, the newest first.
"""

import re
from xml.etree import ElementTree

from ..errors import BadInput
from .model import Gpu, GpuProcess, MigDevice, Reading
from .smi_query import read_query_text
from .smi_text import (
    MAX_INDEX,
    compute_mode,
    counted,
    driver_model,
    lines,
    memory_with_unit,
    mig_device,
    pstate,
    reason_name,
    same_uuid_note,
    small,
    small_with,
    take_lost,
    take_reasons,
    take_uncorrected,
    usable,
    uuid,
    watts_with_unit,
)
from .values import Picked, bus_id, says_nothing, switch

__all__ = ["read_query_text", "read_xml"]

_POWER = ("gpu_power_readings", "power_readings")
# Field of Gpu, how to read it, elements to try in turn.
_FIELDS = (
    ("name", str.strip, ["product_name"]),
    ("uuid", uuid, ["uuid"]),
    ("bus_id", bus_id, ["pci/pci_bus_id"]),
    ("architecture", str.strip, ["product_architecture"]),
    ("memory_total_bytes", memory_with_unit, ["fb_memory_usage/total"]),
    ("memory_used_bytes", memory_with_unit, ["fb_memory_usage/used"]),
    ("pcie_generation", small, ["pci/pci_gpu_link_info/pcie_gen/current_link_gen", "pci/pci_gpu_link_info/pcie_gen/device_current_link_gen"]),
    ("pcie_generation_max", small, ["pci/pci_gpu_link_info/pcie_gen/max_link_gen"]),
    ("pcie_generation_device_max", small, ["pci/pci_gpu_link_info/pcie_gen/max_device_link_gen"]),
    ("pcie_generation_host_max", small, ["pci/pci_gpu_link_info/pcie_gen/max_host_link_gen"]),
    ("pcie_width_lanes", small_with("x"), ["pci/pci_gpu_link_info/link_widths/current_link_width"]),
    ("pcie_width_max_lanes", small_with("x"), ["pci/pci_gpu_link_info/link_widths/max_link_width"]),
    ("pstate", pstate, ["performance_state", *(f"{power}/power_state" for power in _POWER)]),
    ("utilization_percent", small_with("%"), ["utilization/gpu_util"]),
    ("temperature_c", small_with("C"), ["temperature/gpu_temp"]),
    ("power_draw_w", watts_with_unit, [f"{power}/{draw}" for power in _POWER for draw in ("power_draw", "average_power_draw", "instant_power_draw")]),
    ("power_limit_w", watts_with_unit, [f"{power}/{limit}" for power in _POWER for limit in ("current_power_limit", "enforced_power_limit", "power_limit")]),
    ("power_limit_default_w", watts_with_unit, [f"{power}/default_power_limit" for power in _POWER]),
    ("clock_sm_mhz", small_with("MHz"), ["clocks/sm_clock"]),
    ("clock_sm_max_mhz", small_with("MHz"), ["max_clocks/sm_clock"]),
    ("clock_memory_mhz", small_with("MHz"), ["clocks/mem_clock"]),
    ("clock_memory_max_mhz", small_with("MHz"), ["max_clocks/mem_clock"]),
    ("ecc", switch, ["ecc_mode/current_ecc"]),
    ("persistence", switch, ["persistence_mode"]),
    ("compute_mode", compute_mode, ["compute_mode"]),
    ("driver_model", driver_model, ["driver_model/current_dm"]),
    ("mig", switch, ["mig_mode/current_mig"]),
)


def read_xml(text: str) -> Reading | None:
    """Read `nvidia-smi -q -x`; None where the text holds no such XML. Bytes, W, MHz, C.

    A document that breaks off gives its complete GPUs, with the rest in `incomplete`. Raises BadInput where not even one GPU is whole,
    and for entity declarations, which nvidia-smi never writes and which can be made to fill the memory.
    """
    if not re.search(r"<nvidia_smi_log[^<>]{0,99}>\s*(?:[>#|]\s*)?(?:<|\Z)", text):
        return None
    if "<!ENTITY" in text.upper():
        raise BadInput("nvidia-smi -q -x: the XML declares entities, which nvidia-smi never does; not read")
    text = "\n".join(lines(text, None))
    begin = text.index("<nvidia_smi_log") if "<nvidia_smi_log" in text else 0
    stop, second = text.find("</nvidia_smi_log>", begin), text.find("<nvidia_smi_log", begin + 1)
    closed = stop >= 0 and not 0 <= second < stop
    body = text[begin : stop if closed else second if second >= 0 else None]
    head, *pieces = re.split(r"<gpu(?=[\s>])", body)
    told = {name: found[1].strip() for name in ("driver_version", "cuda_version", "attached_gpus") if (found := re.search(rf"<{name}>([^<]*)</{name}>", head))}
    stated = int(told["attached_gpus"]) if re.fullmatch(r"\d{1,4}", told.get("attached_gpus", "")) else None
    incomplete = [] if closed else ["the XML ends before </nvidia_smi_log>"]
    gpus: list[Gpu] = []
    # nvidia-smi numbers GPUs in the order of this list, unless -i picked some of them: then there are fewer than attached.
    in_order = stated is None or len(pieces) == stated or not closed
    for position, piece in enumerate(pieces[: MAX_INDEX + 1]):
        if gpu := _gpu(piece, position if in_order else None):
            gpus.append(gpu)
        else:
            where = re.match(r'\s+id\s*=\s*"([0-9a-fA-F:.]{7,20})"', piece)
            incomplete.append(f"GPU {position}{f' ({where[1]})' if where else ''} is not whole in the XML")
    if not gpus and pieces and (part := _gpu(pieces[0], 0 if in_order else None, whole=False)):
        gpus.append(part)  # better than nothing, and `incomplete` says so
    if not gpus and not (closed and stated == 0):
        raise BadInput("nvidia-smi -q -x: the XML ends before the first GPU is complete; save the whole output of the command")
    count, faults = counted(gpus, stated if stated is not None else len(pieces))
    driver, cuda = (None if says_nothing(told.get(name, "")) else told[name] for name in ("driver_version", "cuda_version"))
    notes = ["a second nvidia-smi XML follows in the same text and was not read"] if second >= 0 else []
    return Reading(
        command="nvidia-smi -q -x", gpus=gpus, gpu_count=count, driver=driver, cuda=cuda, incomplete=incomplete + faults, notes=notes + same_uuid_note(gpus)
    )


def _root(piece: str, whole: bool) -> ElementTree.Element | None:
    """The element from the text that follows '<gpu'; None where it breaks off or is no XML. Not whole: what comes before the break."""
    end = piece.find("</gpu>")
    if not whole:
        parser = ElementTree.XMLPullParser(["start"])
        try:
            parser.feed(f"<gpu{piece}")
            return next((element for _, element in parser.read_events()), None)
        except (ElementTree.ParseError, ValueError):
            return None
    if end < 0:
        return None
    inner = piece[:end]
    # Old drivers write process names as they are, with & and <.
    escaped = re.sub(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9a-fA-F]+);)", "&amp;", inner)
    for attempt in (inner, escaped, re.sub(r"<(accounted_)?processes>.*?</(accounted_)?processes>", "", escaped, flags=re.S)):
        try:
            return ElementTree.fromstring(f"<gpu{attempt}</gpu>")
        except (ElementTree.ParseError, ValueError):
            continue
    return None


def _gpu(piece: str, index: int | None, whole: bool = True) -> Gpu | None:
    """One GPU from the text that follows '<gpu'; None where it breaks off, is no XML, or says nothing."""
    root = _root(piece, whole)
    if root is None:
        return None
    picked = Picked(index=index)
    if index is None:
        picked.unknown["index"] = "the output holds some of the GPUs only and does not number them"
    for field, convert, paths in _FIELDS:
        for path in paths:
            picked.take(field, root.findtext(path), convert)
    picked.take("bus_id", root.get("id"), bus_id)
    usable(picked, root.findtext("fb_memory_usage/reserved"))
    for tag in ("clocks_event_reasons", "clocks_throttle_reasons"):
        reasons = root.find(tag)
        if reasons is not None and "idle" not in picked.values:
            take_reasons(picked, {reason_name(reason.tag): reason.text or "" for reason in reasons})
    take_uncorrected(picked, _uncorrected(root.find("ecc_errors/volatile")))
    picked.values["mig_devices"] = [device for node in root.findall("mig_devices/mig_device")[:64] if (device := _mig_device(node))]
    _take_processes(picked, root.find("processes"))
    take_lost(picked, root.itertext())
    if not whole:
        # Lists and sums may go on behind the break.
        for field in ("processes", "mig_devices", "throttle_reasons", "ecc_uncorrected"):
            picked.values.pop(field, None)
    return picked.gpu() if whole or {*picked.values} - {"index"} else None


def _uncorrected(volatile: ElementTree.Element | None) -> list[str]:
    """Texts of the volatile counters of uncorrectable errors; old drivers count them as double bit errors, with a total."""
    if volatile is None:
        return []
    new = [node.text or "" for node in volatile if "uncorrectable" in node.tag]
    return new or [node.text or "" for node in volatile.findall("double_bit/total")]


def _mig_device(node: ElementTree.Element) -> MigDevice | None:
    number, gi, ci = ((node.findtext(tag) or "?").strip()[:8] for tag in ("index", "gpu_instance_id", "compute_instance_id"))
    return mig_device(number, gi, ci, node.findtext("fb_memory_usage/total"), node.findtext("fb_memory_usage/used"))


def _take_processes(picked: Picked, node: ElementTree.Element | None) -> None:
    """An empty element says that there are none; text in place of processes says why they are not told."""
    if node is None:
        return
    entries = node.findall("process_info")
    words = (node.text or "").strip()
    if not entries and words and words.lower() != "none":
        picked.unknown["processes"] = words[:60]
        return
    processes = []
    for entry in entries[:10000]:
        found = Picked()
        found.take("pid", entry.findtext("pid"), small)
        found.take("name", entry.findtext("process_name"))
        found.take("memory_bytes", entry.findtext("used_memory"), memory_with_unit)
        processes.append(GpuProcess(**found.values))
    picked.values["processes"] = processes
