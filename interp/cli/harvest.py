"""`harvest`: values of a corpus, written to a store by one job of any number."""

import argparse

from interp.cli.common import DTYPES, model_of

HELP = "write values at every token of many texts to disk, as one of any number of jobs"
EXAMPLE = (
    'harvest texts.jsonl --point "blocks.2.resid_post" --out store --shard 0/4 --context 128 --pack'
)


def add(harvest: argparse.ArgumentParser) -> None:
    """Add the options."""
    harvest.description = (
        "Reads the texts of a corpus and writes values of points at every token. It may be killed and called again, and makes "
        "what is missing. Jobs of any scheduler share the work: the same call with --shard 0/64, 1/64 and so on."
    )
    harvest.add_argument(
        "texts",
        metavar="TEXTS",
        help="a .txt (a text each line), .jsonl or .npy file, a pattern in quotes for several, or an address such as s3://...",
    )
    harvest.add_argument(
        "--point",
        action="append",
        required=True,
        metavar="POINT",
        help="a name or a pattern; may be repeated",
    )
    harvest.add_argument("--out", required=True, metavar="DIR", help="the store, or its address")
    harvest.add_argument(
        "--shard", default="0/1", metavar="JOB/JOBS", help="this job (%(default)s)"
    )
    harvest.add_argument(
        "--context", type=int, metavar="N", help="tokens read at once (the model's)"
    )
    harvest.add_argument("--pack", action="store_true", help="read several texts at once")
    harvest.add_argument("--skip-first", action="store_true", help="leave out each first token")
    harvest.add_argument("--column", metavar="NAME", help="of a table, the one that has the texts")
    harvest.add_argument(
        "--values", choices=DTYPES, help="the type of what is written (the model's)"
    )
    harvest.add_argument("--batch", type=int, default=16, help="texts read together (%(default)s)")
    harvest.add_argument("--per-file", type=int, default=64, help="texts of a file (%(default)s)")
    harvest.add_argument("--plan", action="store_true", help="say how large it will be, and end")


def run(options: argparse.Namespace) -> None:
    """Write the store, and print what it has."""
    import torch

    from interp.store import harvest, plan

    job, _, jobs = options.shard.partition("/")
    if not (job.isdecimal() and jobs.isdecimal()):
        raise ValueError(f"--shard must be JOB/JOBS, such as 3/64; got {options.shard!r}")
    settings = {
        "dtype": options.values and getattr(torch, options.values),
        "context": options.context,
        "pack": options.pack,
        "pos": slice(1, None) if options.skip_first else None,
        "column": options.column,
        "batch": options.batch,
        "per_file": options.per_file,
    }
    what = model_of(options, trained=True), options.texts, options.point, options.out
    if options.plan:
        print(plan(*what, **settings))
    else:
        print(harvest(*what, shard=(int(job), int(jobs)), progress=True, **settings))
