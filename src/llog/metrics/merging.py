"""The samples of several workers as those of one service, and samples on their way from one process to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from llog.metrics.families import Family, Sample

WORKER_LABEL = "worker"
Labels = tuple[tuple[str, str], ...]


class PackedSamples(msgspec.Struct, frozen=True):
    """Samples that name their family by its place in a list."""

    families: list[Family]
    values: list[tuple[int, Labels, int | float, str]]

    @classmethod
    def pack(cls, samples: Iterable[Sample]) -> PackedSamples:
        places: dict[Family, int] = {}
        values = [(places.setdefault(family, len(places)), *rest) for family, *rest in samples]
        return cls([*places], values)  # type: ignore[arg-type]

    def unpack(self) -> list[Sample]:
        return [Sample(self.families[place], labels, value, suffix) for place, labels, value, suffix in self.values]


def is_count(sample: Sample) -> bool:
    """Return whether the sample only grows while its process lives."""
    return sample.family.kind != "gauge"


def merge(samples_by_worker: Mapping[int, Iterable[Sample]]) -> list[Sample]:
    """Return the samples of all workers as those of one service, each as its family says (`Family.across`)."""
    merged: dict[tuple[str, str, Labels], Sample] = {}
    for worker, samples in samples_by_worker.items():
        for each in samples:
            sample = _with_worker(each, worker) if each.family.across == "each" else each
            key = sample.family.name, sample.suffix, sample.labels
            found = merged.get(key)
            if found is not None:
                value = max(found.value, sample.value) if sample.family.across == "max" else found.value + sample.value
                sample = sample._replace(value=value)
            merged[key] = sample
    return [*merged.values()]


def _with_worker(sample: Sample, worker: int) -> Sample:
    family = sample.family._replace(labels=(*sample.family.labels, WORKER_LABEL))
    return sample._replace(family=family, labels=(*sample.labels, (WORKER_LABEL, str(worker))))
