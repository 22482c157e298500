from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.plan.events import EventSpec
from stapsdtd.plan.steps import Define, Disable, Enable, EventState, Remove, Step, changes, undo
from tests.unit.samples import key

SPECS = [EventSpec(instance, key(inode), (), ()) for instance in "ab" for inode in range(3)]
WANTED = st.frozensets(st.sampled_from(SPECS))
INSTALLED = st.dictionaries(st.sampled_from(SPECS), st.sampled_from(EventState))
State = Mapping[EventSpec, EventState]


def carried_out(steps: Iterable[Step], before: State) -> dict[EventSpec, EventState]:
    """What a kernel would make of it, which refuses what makes no sense."""
    state = dict(before)
    for step in steps:
        match step:
            case Define(spec):
                assert spec not in state
                state[spec] = EventState.DEFINED
            case Enable(spec):
                assert state[spec] is not EventState.ENABLED
                state[spec] = EventState.ENABLED
            case Disable(spec):
                assert state[spec] is EventState.ENABLED
                state[spec] = EventState.DISABLED
            case Remove(spec):
                assert state[spec] is EventState.DEFINED, "this empties the ring that it was enabled in"
                del state[spec]
    return state


def enabled(state: State) -> set[EventSpec]:
    return {spec for spec, standing in state.items() if standing is EventState.ENABLED}


@given(WANTED, INSTALLED)
def test_changes_lead_to_what_is_wanted(wanted: frozenset[EventSpec], installed: State) -> None:
    after = carried_out(changes(wanted, installed), installed)
    assert enabled(after) == wanted
    assert changes(wanted, after) == []
    # what is neither wanted nor may still have records in a ring is gone
    assert all(spec in wanted or standing is EventState.DISABLED for spec, standing in after.items())


@given(WANTED, INSTALLED)
def test_disarming_comes_first(wanted: frozenset[EventSpec], installed: State) -> None:
    arms = [isinstance(step, Define | Enable) for step in changes(wanted, installed)]
    assert arms == sorted(arms)


@given(WANTED, INSTALLED, st.data())
def test_undo_of_what_was_done_restores_what_is_armed(
    wanted: frozenset[EventSpec], installed: State, data: st.DataObject
) -> None:
    arming = [step for step in changes(wanted, installed) if isinstance(step, Define | Enable)]
    done = arming[: data.draw(st.integers(0, len(arming)))]
    state = carried_out(done, installed)
    inverses = [inverse for step in reversed(done) if (inverse := undo(step)) is not None]
    assert len(inverses) == len(done)
    # an event that was enabled stays defined, since its removal would empty the ring; the executor knows
    kept = {spec for spec in enabled(state) if spec not in installed}
    possible = [inverse for inverse in inverses if not (isinstance(inverse, Remove) and inverse.spec in kept)]
    after = carried_out(possible, state)
    assert enabled(after) == enabled(installed)
    assert after.keys() - installed.keys() == kept


def test_disarming_has_no_undo() -> None:
    assert undo(Disable(SPECS[0])) is None
    assert undo(Remove(SPECS[0])) is None


def test_event_stays_until_its_instance_is_gone() -> None:
    (spec, *_) = SPECS
    state = carried_out(changes({spec}, {}), {})
    state = carried_out(changes(set(), state), state)
    assert state == {spec: EventState.DISABLED}
    assert changes(set(), state) == []
    assert changes(set(), {spec: EventState.DEFINED}) == [Remove(spec)]
    assert changes({spec}, state) == [Enable(spec)]
