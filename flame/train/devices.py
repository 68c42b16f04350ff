"""How many operations a second a device can do, for the share of them that a run makes use of (MFU)."""

from __future__ import annotations

import re

import torch

from flame.train.log import log

# Dense bfloat16, accumulated in fp32, in 10^12 operations a second, from the vendors' data sheets. A name is matched as
# whole words, the first one that fits wins: "A100" is no part of "RTX A1000", and a laptop's GPU is none of these.
PEAK_TFLOPS = {
    r"H100 PCIe": 756,
    r"H100 NVL|H200 NVL": 835,
    r"GH200|H200|H100|H800": 989,
    r"H20": 148,
    r"A100|A800": 312,
    r"GB200|GB300": 2500,
    r"B200|B300": 2250,
    r"L40S": 362,
    r"L40": 181,
    r"L4": 121,
    r"A40": 150,
    r"A30": 165,
    r"A10": 125,
    r"RTX 6000 Ada": 364,
    r"RTX 5090(?! D| Laptop)": 210,
    r"RTX 4090(?! D| Laptop)": 165,
    r"RTX 3090(?! Ti)": 71,
    r"MI355X": 2516,
    r"MI325X|MI300X": 1307,
    r"MI210": 181,
}


def known_peak_flops(device_name: str) -> float | None:
    """Return what a device of this name can do, in operations a second; None where that is not known."""
    for names, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b(?:{names})\b", device_name):
            return tflops * 1e12
    return None


def peak_flops(device: torch.device, peak_tflops: float | None = None) -> float | None:
    """Return what a device can do, in operations a second: `peak_tflops` if given, else by its name.

    Says once where that is not known: MFU is null then.
    """
    if peak_tflops is not None:
        return peak_tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = known_peak_flops(name)
    if peak is None:
        log.info("mfu is null: the peak of a %s is not known here; --metrics.peak_tflops sets it", name)
    return peak
