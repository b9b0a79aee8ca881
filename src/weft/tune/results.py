"""What a benchmark found, one document and one file per operator, written as it goes.

A file holds what is current: with `keeps`, points that a run does not measure in a mode stay as
they were, each row with the commit that it was measured at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.tune.provenance import results_name, write_json


class Results:
    """Takes what `bench` yields. `output` is a file, or a folder where there are `many` operators;
    "" writes nothing. `keeps`: other points of the files that are there stay in them."""

    def __init__(
        self, num_ranks: int, output: str = "", many: bool = False, keeps: bool = False
    ) -> None:
        self.num_ranks = num_ranks
        self.keeps = keeps
        self._before: dict[Path, dict[str, Any]] = {}
        self.output = Path(output) if output else None
        self.is_folder = many or (self.output is not None and self.output.suffix != ".json")
        self.documents: dict[str, dict[str, Any]] = {}
        self._about: dict[str, Any] = {}
        self._device = ""

    @property
    def is_fine(self) -> bool:
        """Was anything of weft's measured everywhere, and did none of weft's variants fail?"""
        return bool(self.documents) and not any(
            failure["variant"].split()[0:1] in ([], ["weft"])
            for document in self.documents.values()
            for failure in document["failed"]
        )

    def take(self, word: str, values: Mapping[str, Any]) -> None:
        if word == "started":
            self._about = {name: value for name, value in values.items() if name != "device"}
            self._device = values["device"]
        elif word == "row":
            self._document(values["op"])["rows"].append(_without_op(values))
        elif word == "failed":
            self._document(values["op"])["failed"].append(_without_op(values))
        elif word in ("skipped", "clocks", "measured"):
            name = values.get("point") or values["after"]
            document = self._document(name.split()[0])
            if word == "skipped":
                document["skipped"].append(name)
            elif word == "clocks":
                document["clocks"].append(dict(values))
            self._write(document)

    def _document(self, op: str) -> dict[str, Any]:
        if op not in self.documents:
            self.documents[op] = {
                "op": op, "hardware": f"{self.num_ranks} x {self._device}", **self._about,
                "clocks": [], "rows": [], "failed": [], "skipped": [],
            }  # fmt: skip
        return self.documents[op]

    def path_of(self, op: str) -> Path | None:
        if self.output is None or not self.is_folder:
            return self.output
        return self.output / results_name(op, self._device, self.num_ranks)

    def paths(self) -> list[Path]:
        return [path for op in self.documents if (path := self.path_of(op))]

    def _write(self, document: dict[str, Any]) -> None:
        path = self.path_of(document["op"])
        if path is None:
            return
        if self.keeps and path not in self._before:
            self._before[path] = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, merged(self._before.get(path, {}), document))


def merged(before: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """`document`, and of `before` what it has not measured, by point and mode, with the commit.

    What was measured on other hardware is not kept.
    """
    if before.get("hardware") != document["hardware"]:
        return dict(document)
    # A variant that could not be made failed in no mode.
    measured = {(_point_of(row), mode) for row in document["rows"] for mode in (row["mode"], None)}
    whole = dict(document)
    for name in ("rows", "failed"):
        kept = [
            {"commit": before.get("commit", ""), **row}
            for row in before[name]
            if (_point_of(row), row["mode"]) not in measured
        ]
        whole[name] = [*document[name], *kept]
    return whole


def _point_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["label"], tuple(row["shape"].items()), row["dtype"]


def _without_op(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "op"}
