"""`llog cost`: what brokers cost on S3, from their own metrics, and what other settings of their batches would cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final

import click
import msgspec

from llog.base.units import format_duration_ms, format_size
from llog.cli.common import DURATION, json_option, note, print_json, print_table
from llog.errors import ConfigurationError
from llog.metrics.billing import MONTH_S
from llog.metrics.flush_model import FlushSettings, Rates, predict_blobs

_ALTERNATIVES: Final = (("250ms", 0.25, None), ("1s", 1.0, None), ("16MiB", None, 16 << 20))
"""Other settings to compare: what changes, and the new delay or size."""


class _Prices(msgspec.Struct):
    storage_gb_month: float
    put_1000: float
    get_10000: float


class _Share(msgspec.Struct):
    name: str
    produced_bytes: int
    consumed_bytes: int
    put_requests: float
    get_requests: float
    request_cost: float


class _Billing(msgspec.Struct):
    prices: _Prices
    requests: dict[str, int]
    request_costs: dict[str, float]
    stored_bytes: int | None
    objects: int | None
    storage_cost_month: float | None
    topics: list[_Share] = []
    producers: list[_Share] = []
    groups: list[_Share] = []


class _S3(msgspec.Struct):
    billing: _Billing


class ServiceMetrics(msgspec.Struct):
    """What is needed of the answer to `GET /metrics`. A compactor has no batches."""

    uptime_seconds: float
    requests: int = msgspec.field(name="llog_batch_queue_wait_seconds_count", default=0)
    blobs: int = msgspec.field(name="llog_blob_bytes_count", default=0)
    batch_bytes: float = msgspec.field(name="llog_batch_bytes_sum", default=0.0)
    delay_s: float = msgspec.field(name="llog_batch_max_delay_seconds", default=0.0)
    bytes_max: float = msgspec.field(name="llog_batch_max_bytes", default=0.0)
    s3: _S3 | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the bill. `month` extrapolates the rate since the start, or during `--for`, to 30 days."""

    item: str
    quantity: float
    dollars: float | None
    dollars_month: float


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """What the same requests would cost with another setting of the batches."""

    flush: str
    puts_month: float
    dollars_month: float


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one topic, producer or consumer group costs."""

    name: str
    produced_bytes: int
    consumed_bytes: int
    puts: float
    gets: float
    dollars: float
    dollars_month: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    observed_s: float
    lines: list[Line]
    alternatives: list[Alternative]
    topics: list[Part]
    producers: list[Part]
    groups: list[Part]


@click.command(short_help="Estimate what brokers cost on S3, and what other batches would cost.")
@click.option(
    "--url",
    "urls",
    metavar="URL",
    multiple=True,
    default=("http://127.0.0.1:8080",),
    show_default=True,
    help="A broker or compactor at http://host:port; repeatable, the costs of all of them are added up.",
)
@click.option(
    "--for",
    "wait_ms",
    type=DURATION,
    help="Watch the brokers for this long, e.g. 60s, instead of taking everything since they started.",
)
@click.option(
    "--top", type=click.IntRange(min=0), default=10, show_default=True, help="The names to list of each kind."
)
@json_option
def cost(urls: tuple[str, ...], wait_ms: int | None, top: int, as_json: bool) -> None:
    """Estimate what brokers cost on S3, and what other settings of their batches would cost.

    The estimate comes from the metrics of the brokers: their requests to the bucket, the blobs in it, and the prices of
    S3 Standard in us-east-1 unless the brokers have others (LLOG_PRICE_…). A month extrapolates the observed rate. Data
    transfer, replication, KMS, taxes and discounts are not included.

    The costs of topics, producers and consumer groups are shares: a PUT is shared by the records in its batch, GETs by
    the bytes that were read from the bucket.

    \b
      llog cost
      llog cost --url http://b1:8080 --url http://b2:8080 --for 60s
    """
    before = [_read_metrics(url) for url in urls] if wait_ms else None
    if wait_ms:
        note(f"llog: watching for {format_duration_ms(wait_ms)}")
        time.sleep(wait_ms / 1000)
    report = make_report([_read_metrics(url) for url in urls], before)
    if as_json:
        print_json(report)
        return
    _print(report, top)


def _read_metrics(url: str) -> ServiceMetrics:
    from llog.transport import BrokerClient

    with closing(BrokerClient(url)) as client:
        metrics = client.get_json(ServiceMetrics, "/metrics")
    if metrics.s3 is None:
        raise ConfigurationError(
            f"the service at {url} keeps its blobs in local files, for which nobody charges: ask one whose LLOG_BLOBS "
            "is a bucket"
        )
    return metrics


def make_report(found: Sequence[ServiceMetrics], before: Sequence[ServiceMetrics] | None) -> Report:
    """Return the costs of all brokers together, of the time since `before` or since their start."""
    spans = [_Span(now, None if before is None else before[index]) for index, now in enumerate(found)]
    billings = [span.billing for span in spans]
    lines = []
    for operation in billings[0].requests:
        monthly = sum(span.cost(operation) / span.seconds for span in spans) * MONTH_S
        lines.append(
            Line(
                item=operation,
                quantity=sum(span.requests(operation) for span in spans),
                dollars=sum(span.cost(operation) for span in spans),
                dollars_month=monthly,
            )
        )
    # Every broker sees the same bucket: the largest footprint is the newest.
    stored = max((each.stored_bytes or 0 for each in billings), default=0)
    storage = max((each.storage_cost_month or 0.0 for each in billings), default=0.0)
    lines.append(Line(item="storage", quantity=stored, dollars=None, dollars_month=storage))
    return Report(
        observed_s=max(span.seconds for span in spans),
        lines=lines,
        alternatives=_alternatives([span for span in spans if span.now.bytes_max]),
        topics=_parts(spans, "topics"),
        producers=_parts(spans, "producers"),
        groups=_parts(spans, "groups"),
    )


class _Span:
    """What one broker did between two readings; a broker that was started again in between counts from its start."""

    def __init__(self, now: ServiceMetrics, before: ServiceMetrics | None) -> None:
        assert now.s3 is not None
        if before is not None and before.uptime_seconds > now.uptime_seconds:
            before = None
        self.now = now
        self.before = before
        self.billing = now.s3.billing
        self._earlier = before.s3.billing if before is not None and before.s3 is not None else None
        self.seconds = max(now.uptime_seconds - (0.0 if before is None else before.uptime_seconds), 0.001)

    def requests(self, operation: str) -> int:
        earlier = 0 if self._earlier is None else self._earlier.requests.get(operation, 0)
        return self.billing.requests[operation] - earlier

    def cost(self, operation: str) -> float:
        earlier = 0.0 if self._earlier is None else self._earlier.request_costs.get(operation, 0.0)
        return self.billing.request_costs[operation] - earlier

    def rates(self) -> Rates:
        was = self.before
        return Rates(
            requests=(self.now.requests - (0 if was is None else was.requests)) / self.seconds,
            bytes=(self.now.batch_bytes - (0.0 if was is None else was.batch_bytes)) / self.seconds,
            blobs=(self.now.blobs - (0 if was is None else was.blobs)) / self.seconds,
        )

    def share(self, kind: str, share: _Share) -> _Share:
        """Return what the share has grown by since the first reading."""
        earlier = [] if self._earlier is None else getattr(self._earlier, kind)
        for each in earlier:
            if each.name == share.name:
                return _Share(
                    name=share.name,
                    produced_bytes=share.produced_bytes - each.produced_bytes,
                    consumed_bytes=share.consumed_bytes - each.consumed_bytes,
                    put_requests=max(share.put_requests - each.put_requests, 0.0),
                    get_requests=max(share.get_requests - each.get_requests, 0.0),
                    request_cost=max(share.request_cost - each.request_cost, 0.0),
                )
        return share


def _alternatives(spans: Sequence[_Span]) -> list[Alternative]:
    """Return what all brokers' blobs would cost now and with each of the other settings."""
    if not spans:
        return []
    delay_ms, size = round(spans[0].now.delay_s * 1000), round(spans[0].now.bytes_max)
    present = f"now ({format_duration_ms(delay_ms)}, {format_size(size).replace(' ', '')})"
    chosen: list[tuple[str, float | None, float | None]] = [(present, None, None), *_ALTERNATIVES]
    found = []
    for name, delay_s, bytes_max in chosen:
        puts = dollars = 0.0
        for span in spans:
            now = FlushSettings(delay_s=span.now.delay_s, bytes_max=span.now.bytes_max)
            other = FlushSettings(
                delay_s=now.delay_s if delay_s is None else delay_s,
                bytes_max=now.bytes_max if bytes_max is None else bytes_max,
            )
            monthly = predict_blobs(span.rates(), now, other) * MONTH_S
            puts += monthly
            dollars += monthly / 1000 * span.billing.prices.put_1000
        found.append(Alternative(flush=name, puts_month=puts, dollars_month=dollars))
    return found


def _parts(spans: Sequence[_Span], kind: str) -> list[Part]:
    """Return the shares of one kind, added up over the brokers, the most expensive first."""
    sums: dict[str, Part] = {}
    for span in spans:
        shares: list[_Share] = getattr(span.billing, kind)
        for share in shares:
            grown = span.share(kind, share)
            was = sums.get(share.name)
            sums[share.name] = Part(
                name=share.name,
                produced_bytes=grown.produced_bytes + (0 if was is None else was.produced_bytes),
                consumed_bytes=grown.consumed_bytes + (0 if was is None else was.consumed_bytes),
                puts=grown.put_requests + (0 if was is None else was.puts),
                gets=grown.get_requests + (0 if was is None else was.gets),
                dollars=grown.request_cost + (0 if was is None else was.dollars),
                dollars_month=grown.request_cost / span.seconds * MONTH_S + (0 if was is None else was.dollars_month),
            )
    return sorted(sums.values(), key=lambda part: (-part.dollars, part.name))


def _print(report: Report, top: int) -> None:
    click.echo(f"observed for {report.observed_s:,.0f} s; a month has 30 days\n")
    total = sum(line.dollars_month for line in report.lines)
    rows = [
        (
            line.item,
            _quantity(line),
            None if line.dollars is None else _dollars(line.dollars),
            _month(line.dollars_month),
        )
        for line in report.lines
    ]
    columns = ["ITEM", "QUANTITY", "USD SO FAR", "USD/MONTH"]
    print_table(columns, [*rows, ("total", None, None, _month(total))], numbers=columns[1:])
    if report.alternatives:
        columns = ["IF THE FLUSH WERE", "PUTS/MONTH", "USD/MONTH"]
        click.echo()
        print_table(
            columns,
            [(each.flush, f"{each.puts_month:,.0f}", _month(each.dollars_month)) for each in report.alternatives],
            numbers=columns[1:],
        )
    for title, parts in (("TOPIC", report.topics), ("PRODUCER", report.producers), ("GROUP", report.groups)):
        if parts and top:
            columns = [title, "PRODUCED", "CONSUMED", "PUTS", "GETS", "USD SO FAR", "USD/MONTH"]
            click.echo()
            print_table(columns, [_cells(part) for part in parts[:top]], numbers=columns[1:])
            if len(parts) > top:
                note(f"llog: {len(parts) - top} more; --top shows them")


def _quantity(line: Line) -> str:
    return format_size(round(line.quantity)) if line.item == "storage" else f"{line.quantity:,.0f}"


def _cells(part: Part) -> list[str]:
    return [
        part.name,
        format_size(part.produced_bytes),
        format_size(part.consumed_bytes),
        f"{part.puts:,.1f}",
        f"{part.gets:,.1f}",
        _dollars(part.dollars),
        _month(part.dollars_month),
    ]


def _dollars(dollars: float) -> str:
    return f"{dollars:,.6f}"


def _month(dollars: float) -> str:
    return f"{dollars:,.2f}"
