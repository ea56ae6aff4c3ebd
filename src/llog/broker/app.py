"""The broker: what one process holds, wired together and served over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from llog.batch.columns import Buffer
from llog.broker.arrivals import Arrivals
from llog.broker.auto_creation import AutoCreatingProducer, AutoCreation
from llog.broker.batching import BatchingProducer
from llog.broker.cache.tail import SharedTail, Tail, private_directory
from llog.broker.fetcher import Fetcher
from llog.broker.http.bodies import Bodies
from llog.broker.http.forwarding import Forwarding
from llog.broker.http.routing import App
from llog.broker.metrics import Metrics
from llog.broker.monitoring.description import Description
from llog.broker.monitoring.group_lag import GroupLags
from llog.broker.monitoring.report import BrokerReport
from llog.broker.partitioner import Partitioner
from llog.broker.routes.documents import DocumentRoutes
from llog.broker.routes.groups import GroupRoutes
from llog.broker.routes.health import HealthRoutes
from llog.broker.routes.keyed import KeyedRoutes
from llog.broker.routes.metrics import MetricRoutes
from llog.broker.routes.partition_records import PartitionRecordRoutes
from llog.broker.routes.records import RecordRoutes
from llog.broker.routes.sql import SqlRoutes
from llog.broker.routes.tails import TailRoutes
from llog.broker.routes.topic_records import TopicRecordRoutes
from llog.broker.routes.topics import TopicRoutes
from llog.broker.tails import Tails
from llog.broker.tracing import open_tracer
from llog.broker.workers.metrics import WorkerMetrics
from llog.broker.workers.plan import WorkerPlan
from llog.config import Settings
from llog.engines.object.reader import Reader
from llog.engines.object.views import Views
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import LlogError
from llog.groups.dispatcher import Dispatcher
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.log.catalog import OBJECT, Catalog
from llog.log.keys import LOG_ID
from llog.log.log import Log
from llog.log.opening import inline_limits, writer_options
from llog.log.records import Topic
from llog.metrics.billing import Billing
from llog.runtime import uuid7


class Broker:
    """Everything that one broker process holds. Made on the event loop that it runs on; `close` before the log is
    closed.
    """

    def __init__(self, log: Log, settings: Settings, plan: WorkerPlan | None = None) -> None:
        """A broker that is one of several workers has a `plan`."""
        self.metrics = Metrics()
        self.stopping = asyncio.Event()
        self._ownership: asyncio.Future[None] | None = None
        self._log = log
        self._settings = settings
        self._tracer = open_tracer(settings)
        if self._tracer is not None:
            self._tracer.watch_stores(log)
        self.catalog, self.reader = Catalog(log), EngineReader(log)
        catalog, reader = self.catalog, self.reader
        self._tail = Tail(0 if settings.role == "write" else settings.tail_cache_max_bytes, self.metrics)
        object_reader = log.engines[OBJECT].reader(log)
        assert isinstance(object_reader, Reader)
        self.views = Views(log, settings.tail_staleness_ms, object_reader)
        self.appender = appender = EngineAppender(
            log, writer_options(settings, on_commit=self._keep_appended, counts=self.metrics.appends)
        )
        self._eager_producer = self._batching_producer(appender, is_eager=True)
        self._patient_producer = self._batching_producer(appender, is_eager=False)
        description = Description(log, settings)

        def choose_producer(topic: Topic) -> BatchingProducer:
            uses_blobs = not catalog.engine(topic).has_owner
            return self._patient_producer if uses_blobs and description.is_patient else self._eager_producer

        self._arrivals = Arrivals(reader, self.views, self.metrics, self.stopping)
        bodies = Bodies(settings, self.metrics)
        self._forwarding = Forwarding(
            settings, bodies, self.metrics, self.stopping, plan.siblings.values() if plan is not None else ()
        )
        self._keyed = KeyedRoutes(settings, self.metrics, self.stopping, bodies, log.owners)
        self._sql = SqlRoutes(log, settings, self.stopping, bodies)
        self.producer = producer = AutoCreatingProducer(
            AutoCreation(catalog, settings.auto_create), choose_producer, self.metrics
        )
        self.fetcher = fetcher = Fetcher(
            reader, catalog, self.views, self._tail, self.metrics, self._arrivals, self.stopping
        )
        self._partitioner = partitioner = Partitioner(producer.find_topics, settings.tail_staleness_ms, log.runtime)
        records = RecordRoutes(
            producer,
            fetcher,
            reader,
            bodies,
            self._forwarding,
            self.metrics,
            partitioner,
        )
        self._billing = Billing(log, settings)
        group_listing = GroupListing(Groups(log, reader))
        self._group_lags = GroupLags(group_listing, settings.group_lag_interval_ms)
        self.report = BrokerReport(log, self.metrics, description, self._billing, self._group_lags)
        self._workers = None if plan is None else WorkerMetrics(plan, self.report, self.metrics)
        metric_routes = (
            MetricRoutes(self.report.read)
            if self._workers is None
            else MetricRoutes(self._workers.read, self._workers.read_own)
        )
        self._resources = (
            records,
            TopicRecordRoutes(records.produce_items, bodies),
            PartitionRecordRoutes(fetcher, reader),
            TailRoutes(Tails(fetcher, self.metrics, self.stopping), catalog, reader),
            TopicRoutes(log, catalog, reader, self.note_change, bodies),
            GroupRoutes(
                Dispatcher(log, reader, appender, waiter=self._arrivals, stopping=self.stopping),
                group_listing,
                self._sql.find_tables_owner,
                bodies,
                self.metrics,
            ),
            HealthRoutes(log, self.stopping, {"keyed log": self._keyed.check}),
            metric_routes,
            self._keyed,
            self._sql,
        )

    @property
    def log(self) -> Log:
        return self._log

    def note_change(self, topic: str) -> None:
        """Look the topic up again before it is used, since this broker has changed or deleted it."""
        self.views.note_change(topic)
        self._partitioner.forget(topic)

    def app(self) -> App:
        routes = [route for resource in self._resources for route in resource.routes()]
        routes += DocumentRoutes(list(routes)).routes()
        return App(routes, self._settings, self._forwarding, self.metrics, self._tracer)

    async def start(self) -> None:
        """Open the tables and the shared tail, if they are configured, and begin to take up what this machine has."""
        directory = None
        if self._settings.tail_cache_dir is not None and self._settings.tail_cache_max_bytes:
            directory = private_directory(Path(self._settings.tail_cache_dir))
        await self._sql.start()
        self._ownership = asyncio.ensure_future(self._take_up())
        if directory is not None:
            await self._open_shared_tail(directory)

    async def close(self) -> None:
        """End waits and append what was accepted; return when all of it is answered."""
        self.stopping.set()
        if self._ownership is not None:
            self._ownership.cancel()
            await asyncio.gather(self._ownership, return_exceptions=True)
        await asyncio.gather(self._eager_producer.close(), self._patient_producer.close())
        await self._arrivals.close()
        await self.views.close()
        await self._tail.close()
        await self._keyed.close()
        await self._billing.close()
        await self._group_lags.close()
        await self._sql.close()
        await self._forwarding.close()
        if self._workers is not None:
            await self._workers.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _batching_producer(self, appender: EngineAppender, *, is_eager: bool) -> BatchingProducer:
        settings = self._settings
        return BatchingProducer(
            appender,
            self.metrics,
            max_bytes=settings.batch_max_bytes,
            max_delay_s=settings.batch_delay_ms / 1000,
            is_eager=is_eager,
            inline=inline_limits(settings),
            tracer=self._tracer,
        )

    def _keep_appended(self, directory: str, partition: int, start_offset: int, parts: Sequence[Buffer]) -> None:
        """Keep a batch that was just committed here, and then wake who waits for it."""
        count = self._tail.keep_appended(directory, partition, start_offset, parts)
        self.views.note_append(directory, partition, start_offset + count)

    async def _open_shared_tail(self, directory: Path) -> None:
        """Open the shared tail in a directory of this log's own: other logs have other records."""
        log_id = await self._log.meta.get(LOG_ID)
        if log_id is None:
            return
        settings, runtime = self._settings, self._log.runtime
        writer = None if settings.role == "read" else uuid7(runtime.now_ms(), runtime.random())
        root = directory / log_id.value.decode()
        self._tail.share(SharedTail(root, writer, settings.tail_cache_max_bytes, self.metrics))

    async def _take_up(self) -> None:
        """Become the owner of what the directories of this machine have, at once or when their present owner has ended:
        other brokers look for an owner.
        """
        steps = [self._sql.take_up]
        if self._settings.role != "read":
            steps += [engine.take_ownership for engine in self._log.engines.values()]
        while True:
            for step in steps:
                with suppress(LlogError):  # another process has them, or a store is out of order, which `/health` says
                    await step()
            await self._log.runtime.sleep(self._settings.session_timeout_ms / 1000)
