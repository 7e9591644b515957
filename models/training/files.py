"""What a training run leaves in its directory: a log, and a checkpoint that is whole at all times."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
# To be raised by every change after which a run would go on with other numbers.
CODE_VERSION = 1


class RunFiles:
    """The files of one run; without a directory nothing is written.

    Args:
        directory: where they are; made if it is not there.
        run: what the run is: only a checkpoint of the same one can be gone on from. Nested dicts.
    """

    def __init__(self, directory: Path | None, run: Mapping[str, Any]) -> None:
        self.directory = directory
        self._run = {**run, "code": {"version": CODE_VERSION, "torch": str(torch.__version__)}}
        self._saved = 0
        self._log: TextIO | None = None

    @property
    def checkpoint(self) -> Path | None:
        """Where the checkpoint is, once there is one."""
        return self.directory / CHECKPOINT if self.directory else None

    @property
    def last(self) -> str:
        """In words, what can be gone on from."""
        if self.checkpoint is None or not self._saved:
            return "no checkpoint has been written"
        return f"{self.checkpoint} is that of step {self._saved}, whole"

    @property
    def way_on(self) -> str:
        """In words, how to go on from it."""
        return f"{self.last}: resume=True goes on from there" if self._saved else self.last

    def open(self, records: Sequence[Mapping[str, Any]], *, resume: bool) -> None:
        """Begins the log, with the steps that were taken before.

        Raises:
            FileExistsError: if another run's checkpoint is there and is not gone on from.
            OSError: if the directory or the log cannot be written.
        """
        if self.directory is None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        if (self.directory / CHECKPOINT).exists() and not resume:
            raise FileExistsError(
                f"{self.directory} has the checkpoint of a run already: resume it, or choose another "
                "directory"
            )
        # Written anew from the checkpoint: a run that was killed has logged steps after it.
        log, partial = self.directory / LOG, self.directory / f".{LOG}.partial"
        try:
            partial.write_text("".join(map(_line, records)), encoding="utf-8")
            partial.replace(log)
            self._log = log.open("a", encoding="utf-8")
        except OSError as error:
            raise OSError(f"{log} cannot be written: {error.strerror}; {self.last}") from None
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the log."""
        if self._log is not None:
            # What could not be written has been reported, or is in the checkpoint.
            with suppress(OSError):
                self._log.close()
            self._log = None

    def log(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the log.

        Raises:
            OSError: naming the file, if it cannot be written.
        """
        if self._log is not None and self.directory is not None:
            try:
                self._log.write(_line(record))
                self._log.flush()
            except OSError as error:
                raise OSError(
                    f"{self.directory / LOG} cannot be written at step {record['step']}: "
                    f"{error.strerror}; {self.last}"
                ) from None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Replaces the checkpoint. Whatever happens, the old or the new one is there, whole.

        Raises:
            OSError: saying why, if it cannot be written.
        """
        if self.checkpoint is None:
            return
        # In the same directory, as a move between file systems is a copy.
        partial = self.checkpoint.with_name(f".{CHECKPOINT}.partial")
        try:
            with partial.open("wb") as file:
                torch.save({**state, "step": step, "run": self._run}, file)
                file.flush()
                # Else a power cut could leave the new name on an empty file.
                os.fsync(file.fileno())
            partial.replace(self.checkpoint)
        # torch.save hides the reason in an error of its own.
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__
            why = reason.strerror if isinstance(reason, OSError) else error
            raise OSError(
                f"the checkpoint of step {step} cannot be written to {self.directory}: {why}; "
                f"{self.last}"
            ) from None
        finally:
            partial.unlink(missing_ok=True)
        _sync(self.checkpoint.parent)
        self._saved = step

    def load(self) -> dict[str, Any]:
        """The state that was saved last.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it is damaged, or that of another run: naming what differs.
        """
        if self.checkpoint is None:
            raise ValueError("to resume, give the directory of the run")
        if not self.checkpoint.is_file():
            raise FileNotFoundError(f"{self.directory} has no {CHECKPOINT} to resume from")
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            run, self._saved = state["run"], state["step"]
        # A damaged file can raise anything: errors of zip, of pickle, of torch.
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            raise ValueError(f"{self.checkpoint} is not a whole checkpoint: {reason}") from None
        different = list(_differences(run, self._run))
        if different:
            raise ValueError(
                f"{self.checkpoint} is of another run and cannot be resumed by this one: "
                + "; ".join(different)
            )
        return dict(state)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _differences(theirs: Any, ours: Any, name: str = "") -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in {**theirs, **ours}:
            yield from _differences(
                theirs.get(key), ours.get(key), f"{name}.{key}" if name else str(key)
            )
    elif theirs != ours:
        yield f"{name} is {theirs!r} there and {ours!r} here"


def _sync(directory: Path) -> None:
    """Makes the new name of a file survive a power cut, where the system has a way."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
