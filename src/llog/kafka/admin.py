"""Topics and their options: CreateTopics, DeleteTopics, CreatePartitions, and reading and changing configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llog.base.secret import Secret
from llog.config import SETTINGS, Settings
from llog.config.declaration import Setting
from llog.engines.upkeep import release_deleted
from llog.errors import ConfigurationError, InvalidArgument, LlogError
from llog.kafka.error_codes import ErrorCode, error_code, topic_error_code
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
)
from llog.kafka.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from llog.kafka.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from llog.kafka.messages.delete_topics import DeletableTopicResult, DeleteTopicsRequest, DeleteTopicsResponse
from llog.kafka.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from llog.kafka.messages.incremental_alter_configs import (
    AlterConfigsResourceResponse as IncrementalAlterConfigsResourceResponse,
)
from llog.kafka.messages.incremental_alter_configs import (
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from llog.kafka.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from llog.kafka.topic_configs import (
    CONFIG_TYPES,
    all_changeable,
    changes_of,
    default_configs,
    is_fixed,
    options_of,
    show_configs,
)
from llog.kafka.topic_ids import topic_id
from llog.log.catalog import Catalog, check_growth, check_partitions
from llog.log.log import Log
from llog.log.records import Cleanup, Topic
from llog.model import check_topic_name
from llog.stores.addresses import redact

_TOPIC: Final = 2
_BROKER: Final = 4
_BROKER_LOGGER: Final = 8
_SOURCE_TOPIC: Final = 1
_SOURCE_BROKER: Final = 4
_SOURCE_DEFAULT: Final = 5
_SET: Final = 0
_DELETE: Final = 1


class AdminHandlers:
    """`note_change` is called with the name of each topic that was changed or deleted."""

    def __init__(
        self, log: Log, log_id: str, catalog: Catalog, settings: Settings, note_change: Callable[[str], None]
    ) -> None:
        self._log = log
        self._log_id = log_id
        self._catalog = catalog
        self._settings = settings
        self._note_change = note_change

    def handlers(self) -> Handlers:
        return {
            19: self.create_topics,
            20: self.delete_topics,
            32: self.describe_configs,
            33: self.alter_configs,
            37: self.create_partitions,
            44: self.incremental_alter_configs,
            46: self.list_partition_reassignments,
        }

    # --- topics

    async def create_topics(self, request: CreateTopicsRequest, _: Caller) -> CreateTopicsResponse:
        names = [topic.name for topic in request.topics]
        results = []
        for wanted in request.topics:
            if names.count(wanted.name) > 1:
                twice = InvalidArgument(f"the request names topic {wanted.name!r} more than once")
                results.append(_not_created(wanted, ErrorCode.INVALID_REQUEST, twice))
                continue
            try:
                results.append(await self._create(wanted, validate_only=request.validate_only))
            except LlogError as error:
                results.append(_not_created(wanted, topic_error_code(error), error))
        return CreateTopicsResponse(topics=results)

    async def _create(self, wanted: CreatableTopic, *, validate_only: bool) -> CreatableTopicResult:
        check_topic_name(wanted.name)
        partitions = len(wanted.assignments) or wanted.num_partitions
        if partitions == -1:
            partitions = int(self._settings.auto_create) if self._settings.auto_create.isdecimal() else 1
        try:
            check_partitions(partitions)
        except InvalidArgument as error:
            return _not_created(wanted, ErrorCode.INVALID_PARTITIONS, error)
        options = options_of({config.name: config.value for config in wanted.configs})
        if options.get("cleanup") is Cleanup.COMPACT:
            # A client that asks for compaction cannot be expected to know which engines are able to compact.
            able = [name for name, engine in self._log.engines.items() if engine.compacts_keys]
            options = {"engine": able[0]} | options if able else options
        if validate_only:
            topic = Topic(name=wanted.name, partitions=partitions, directory="", **options)
            identity = bytes(16)
        else:
            topic = await self._catalog.create(wanted.name, partitions, **options)
            identity = topic_id(self._log_id, topic.directory)
            self._note_change(wanted.name)
        defaults = default_configs()
        return CreatableTopicResult(
            name=wanted.name,
            topic_id=identity,
            num_partitions=partitions,
            replication_factor=1,
            configs=[
                CreatableTopicConfigs(
                    name=name,
                    value=value,
                    read_only=is_fixed(name),
                    config_source=_SOURCE_DEFAULT if value == defaults[name] else _SOURCE_TOPIC,
                )
                for name, value in show_configs(topic).items()
            ],
        )

    async def delete_topics(self, request: DeleteTopicsRequest, caller: Caller) -> DeleteTopicsResponse:
        names: list[str | None] = list(request.topic_names)
        ids = [topic.topic_id for topic in request.topics if topic.name is None]
        names += [topic.name for topic in request.topics if topic.name is not None]
        results = [await self._delete(name) for name in names if name is not None]
        if ids:
            by_id = {topic_id(self._log_id, topic.directory): topic.name for topic in await self._catalog.topics()}
            for each in ids:
                if each in by_id:
                    results.append(await self._delete(by_id[each], each))
                else:
                    results.append(
                        DeletableTopicResult(name=None, topic_id=each, error_code=ErrorCode.UNKNOWN_TOPIC_ID)
                    )
        return DeleteTopicsResponse(responses=results)

    async def _delete(self, name: str, identity: bytes = bytes(16)) -> DeletableTopicResult:
        try:
            await self._catalog.delete(name)
            self._note_change(name)
            await release_deleted(self._log)
        except LlogError as error:
            return DeletableTopicResult(
                name=name, topic_id=identity, error_code=topic_error_code(error), error_message=str(error)
            )
        return DeletableTopicResult(name=name, topic_id=identity)

    async def create_partitions(self, request: CreatePartitionsRequest, _: Caller) -> CreatePartitionsResponse:
        return CreatePartitionsResponse(
            results=[await self._grow(topic, validate_only=request.validate_only) for topic in request.topics]
        )

    async def _grow(self, wanted: CreatePartitionsTopic, *, validate_only: bool) -> CreatePartitionsTopicResult:
        try:
            topic = await self._catalog.get(wanted.name)
            if wanted.count == topic.partitions:
                raise InvalidArgument(f"topic {wanted.name!r} has {wanted.count} partitions already")
            check_growth(topic, wanted.count)
            if not validate_only:
                await self._catalog.add_partitions(wanted.name, wanted.count)
                self._note_change(wanted.name)
        except LlogError as error:
            code = ErrorCode.INVALID_PARTITIONS if isinstance(error, InvalidArgument) else error_code(error)
            return CreatePartitionsTopicResult(name=wanted.name, error_code=code, error_message=str(error))
        return CreatePartitionsTopicResult(name=wanted.name)

    async def list_partition_reassignments(
        self, request: ListPartitionReassignmentsRequest, _: Caller
    ) -> ListPartitionReassignmentsResponse:
        """Answer that no partition is moving: none ever does."""
        return ListPartitionReassignmentsResponse(topics=[])

    # --- configurations

    async def describe_configs(self, request: DescribeConfigsRequest, _: Caller) -> DescribeConfigsResponse:
        return DescribeConfigsResponse(
            results=[await self._describe(each, with_synonyms=request.include_synonyms) for each in request.resources]
        )

    async def _describe(self, resource: DescribeConfigsResource, *, with_synonyms: bool) -> DescribeConfigsResult:
        result = DescribeConfigsResult(resource_type=resource.resource_type, resource_name=resource.resource_name)
        try:
            if resource.resource_type == _TOPIC:
                configs = _topic_configs(await self._catalog.get(resource.resource_name), with_synonyms=with_synonyms)
            elif resource.resource_type == _BROKER:
                configs = [_broker_config(setting, self._settings) for setting in SETTINGS.values()]
            elif resource.resource_type == _BROKER_LOGGER:
                configs = []
            else:
                raise InvalidArgument(f"there is no resource of type {resource.resource_type}")
        except LlogError as error:
            result.error_code, result.error_message = topic_error_code(error), str(error)
            return result
        wanted = resource.configuration_keys
        result.configs = [config for config in configs if not wanted or config.name in wanted]
        return result

    async def alter_configs(self, request: AlterConfigsRequest, _: Caller) -> AlterConfigsResponse:
        """Set all options of topics: those that are not named go back to their defaults."""
        responses = []
        for resource in request.resources:
            named: dict[str, str | None] = dict.fromkeys(all_changeable())
            named |= {config.name: config.value for config in resource.configs if not is_fixed(config.name)}
            code, message = await self._change(
                resource.resource_type, resource.resource_name, named, validate_only=request.validate_only
            )
            responses.append(
                AlterConfigsResourceResponse(
                    error_code=code,
                    error_message=message,
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
            )
        return AlterConfigsResponse(responses=responses)

    async def incremental_alter_configs(
        self, request: IncrementalAlterConfigsRequest, _: Caller
    ) -> IncrementalAlterConfigsResponse:
        responses = []
        for resource in request.resources:
            message: str | None
            if any(config.config_operation not in (_SET, _DELETE) for config in resource.configs):
                code, message = ErrorCode.INVALID_CONFIG, "options of topics are no lists: only set or delete them"
            else:
                named = {
                    config.name: config.value if config.config_operation == _SET else None
                    for config in resource.configs
                }
                code, message = await self._change(
                    resource.resource_type, resource.resource_name, named, validate_only=request.validate_only
                )
            responses.append(
                IncrementalAlterConfigsResourceResponse(
                    error_code=code,
                    error_message=message,
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
            )
        return IncrementalAlterConfigsResponse(responses=responses)

    async def _change(
        self, resource_type: int, name: str, configs: dict[str, str | None], *, validate_only: bool
    ) -> tuple[ErrorCode, str | None]:
        try:
            if resource_type != _TOPIC:
                raise ConfigurationError("only options of topics can be changed here: a broker reads LLOG_ settings")
            changes: dict[str, Any] = changes_of(configs)
            await self._catalog.get(name)
            if changes and not validate_only:
                await self._catalog.set_options(name, **changes)
                self._note_change(name)
        except LlogError as error:
            code = ErrorCode.INVALID_CONFIG if isinstance(error, InvalidArgument) else error_code(error)
            return code, str(error)
        return ErrorCode.NONE, None


def _topic_configs(topic: Topic, *, with_synonyms: bool) -> list[DescribeConfigsResourceResult]:
    defaults = default_configs()
    configs = []
    for name, value in show_configs(topic).items():
        synonyms = [DescribeConfigsSynonym(name=name, value=defaults[name], source=_SOURCE_DEFAULT)]
        if value != defaults[name]:
            synonyms.insert(0, DescribeConfigsSynonym(name=name, value=value, source=_SOURCE_TOPIC))
        configs.append(
            DescribeConfigsResourceResult(
                name=name,
                value=value,
                read_only=is_fixed(name),
                config_source=synonyms[0].source,
                synonyms=synonyms if with_synonyms else [],
                config_type=CONFIG_TYPES[name],
            )
        )
    return configs


def _broker_config(setting: Setting, settings: Settings) -> DescribeConfigsResourceResult:
    value, is_secret = getattr(settings, setting.field), setting.kind is Secret
    return DescribeConfigsResourceResult(
        name=setting.variable,
        value=None if is_secret or value is None else redact(str(value)),
        read_only=True,
        config_source=_SOURCE_BROKER,
        is_sensitive=is_secret,
    )


def _not_created(wanted: CreatableTopic, code: ErrorCode, error: LlogError) -> CreatableTopicResult:
    return CreatableTopicResult(
        name=wanted.name,
        error_code=code,
        error_message=str(error),
        num_partitions=-1,
        replication_factor=-1,
        configs=None,
    )
