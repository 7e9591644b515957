"""Read the numbers from the page of a report."""

import base64
import json
import re

import torch

import interp.report as reports


def numbers(packed):
    """Return the array that a part of a page contains."""
    raw = bytearray(base64.b64decode(packed["base64"]))
    dtype = {"f4": torch.float32, "f8": torch.float64}[packed["type"]]
    return torch.frombuffer(raw, dtype=dtype).view(packed["shape"])


def embedded(page):
    """Return the parts of a page by their headings."""
    parts = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["parts"]
    return {part["heading"]: part for part in parts}


def scores_of(page, kind):
    return numbers(embedded(page)[f"{kind} heads"]["values"])[0]


def patches_of(page):
    """Return the shares of activation patching on a page, [layer, place], by site."""
    sites = {f"Patching: {heading}": site for site, heading in reports.SITES.items()}
    return {
        sites[heading]: numbers(part["values"])[0]
        for heading, part in embedded(page).items()
        if heading in sites
    }
