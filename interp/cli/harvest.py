"""The command `harvest`: write activations of a corpus to a store, as one of several jobs."""

import argparse
from typing import Any

from interp.cli.common import in_format, model_of


def run(options: argparse.Namespace) -> None:
    """Write the store, and print its contents."""
    import torch

    from interp.store import HarvestConfig, harvest, plan

    job, _, jobs = options.shard.partition("/")
    if not (job.isdecimal() and jobs.isdecimal()):
        raise ValueError(f"--shard must be JOB/JOBS, such as 3/64; got {options.shard!r}")
    config = HarvestConfig(
        dtype=options.values and getattr(torch, options.values),
        context=options.context,
        pack=options.pack,
        pos=slice(1, None) if options.skip_first else None,
        column=options.column,
        batch=options.batch,
        per_file=options.per_file,
    )
    model = model_of(options, trained=True)
    arguments = (model, options.texts, options.point, options.out, config)
    if options.plan:
        written: Any = plan(*arguments)
    else:
        written = harvest(*arguments, shard=(int(job), int(jobs)))
    print(in_format(repr(written), written.as_json(), is_json=options.json))
