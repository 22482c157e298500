"""Kernel functions: requests to selectors, and what is found to messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from stapsdtd.api.access import Caller
from stapsdtd.api.backend import Backend
from stapsdtd.api.kernel_shapes import enumerator_messages, shape_message
from stapsdtd.api.texts import RequestTexts
from stapsdtd.arch.registry import of_host
from stapsdtd.errors import InvalidArgumentError, KernelFeatureError, about
from stapsdtd.functions.attaching import Way
from stapsdtd.functions.lookup import MAX_TRACED
from stapsdtd.functions.model import FunctionArgument, KernelFunction, Unfound
from stapsdtd.functions.probes import objects_of
from stapsdtd.functions.selectors import FIELD, MAX_VALUES
from stapsdtd.functions.values import ResolvedValue
from stapsdtd.model import Object
from stapsdtd.v1 import kernel_functions_pb2 as pb

_LOGGED_CHARACTERS = 200
_ENGINE, _REMEDY = "bpf", "run the daemon with the bpf engine; 'stapsdt doctor' says what that needs"
_MAX_WITH_VALUES = 64


async def list_functions(
    backend: Backend, request: pb.ListKernelFunctionsRequest, caller: Caller
) -> pb.ListKernelFunctionsResponse:
    """Raises AccessDeniedError, InvalidArgumentError and KernelFeatureError."""
    with caller.recording_refusals():
        # whatever a client may list: /sys/kernel/btf and /proc/kallsyms tell everybody the same
        caller.rights.check_list()
    caller.log(logging.DEBUG, "allowed", functions=" ".join(request.functions)[:_LOGGED_CHARACTERS])
    client = caller.rights.client
    selectors = await asyncio.to_thread(RequestTexts(backend.limits).functions, request.functions)
    with about(FIELD):
        if request.names_only:
            names = await asyncio.wrap_future(backend.functions.names(client, selectors))
            return pb.ListKernelFunctionsResponse(names=names.names, left_out=names.left_out)
        found = await asyncio.wrap_future(backend.functions.functions(client, selectors, with_shapes=request.types))
    return pb.ListKernelFunctionsResponse(
        functions=map(_function, found.functions),
        unknown=map(_unfound, found.unfound),
        left_out=found.left_out,
        ways=map(_way, found.ways),
        types=map(shape_message, found.shapes),
    )


async def traced_functions(
    backend: Backend, functions: Sequence[str], texts: RequestTexts, caller: Caller
) -> tuple[Object, ...]:
    """Return the kernel functions that a subscription names, as objects. texts: of its request.

    Raises AccessDeniedError, InvalidArgumentError, LimitReachedError and KernelFeatureError.
    """
    if not functions:
        return ()
    with caller.recording_refusals():
        caller.rights.check_functions()
    if backend.engine != _ENGINE:
        with about(FIELD):
            raise KernelFeatureError(_ENGINE, f"the {backend.engine} engine does not trace kernel functions", _REMEDY)
    selectors = texts.functions(functions)
    if sum(bool(selector.values) for selector in selectors) > _MAX_WITH_VALUES:
        raise InvalidArgumentError(FIELD, f"at most {_MAX_WITH_VALUES} may have values")
    with about(FIELD):
        found = await asyncio.wrap_future(backend.functions.functions(caller.rights.client, selectors, most=MAX_TRACED))
    for unknown in found.unfound:
        meant = f"; did you mean {', '.join(unknown.near)}?" if unknown.near else ""
        reason = f"{unknown.selector}: {unknown.reason}{meant}"
        raise InvalidArgumentError(FIELD, reason, 0, unknown.selector)
    if found.left_out:
        raise InvalidArgumentError(FIELD, f"{found.left_out} functions too many match; {MAX_TRACED} are possible")
    for function in found.functions:
        if len(function.values) > MAX_VALUES:
            raise InvalidArgumentError(
                FIELD, f"{len(function.values)} values of {function.name}; the limit is {MAX_VALUES}"
            )
    architecture = of_host()
    return objects_of(found.functions, found.ways, architecture.name if architecture else "")


def _function(function: KernelFunction) -> pb.KernelFunction:
    return pb.KernelFunction(
        name=function.name,
        module=function.module,
        prototype=function.prototype,
        arguments=map(_argument, function.arguments),
        result=_argument(function.result),
        ways=function.attachability.ways,
        refused=function.attachability.refused,
        values=[_value(value, function) for value in function.values],
    )


def _argument(argument: FunctionArgument) -> pb.KernelArgument:
    return pb.KernelArgument(
        name=argument.name,
        type=argument.declared,
        size=argument.size,
        registers=argument.passed.registers,
        refused=argument.passed.refused,
        record_size=argument.record_size,
        signed=argument.is_signed,
    )


def _value(value: ResolvedValue, function: KernelFunction) -> pb.KernelValue:
    at = value.location
    root = function.result if at.argument is None else function.arguments[at.argument]
    return pb.KernelValue(
        text=value.text,
        type=value.declared,
        size=value.size,
        argument=at.argument,
        offsets=at.offsets,
        bit_field=pb.BitField(offset=at.bit_offset, bits=at.bits) if at.bits else None,
        enumerators=enumerator_messages(value.enumerators),
        refused=root.passed.refused,
        signed=value.is_signed,
        shape=value.shape,
        is_text=value.is_text,
    )


def _unfound(unfound: Unfound) -> pb.UnknownKernelFunction:
    return pb.UnknownKernelFunction(function=unfound.selector, reason=unfound.reason, near=unfound.near)


def _way(way: Way) -> pb.AttachWay:
    return pb.AttachWay(name=way.name, available=way.is_available, problem=way.problem, remedy=way.remedy)
