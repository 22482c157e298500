from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.plan.actions import Action, Define, Disable, Enable, Installed, Remove, Wanted, changes, undo
from stapsdtd.plan.events import EventSpec
from tests.unit.samples import key

SPECS = [EventSpec(key(inode), (), ()) for inode in range(4)]
INSTANCES = st.frozensets(st.sampled_from("abc"))
WANTED = st.dictionaries(st.sampled_from(SPECS), INSTANCES.filter(bool))
INSTALLED = st.dictionaries(
    st.sampled_from(SPECS),
    st.builds(lambda enabled, earlier: Installed(enabled, enabled | earlier), INSTANCES, INSTANCES),
)
State = dict[EventSpec, Installed]


def carried_out(actions: Iterable[Action], before: State) -> State:
    """What a kernel would make of it, which refuses what makes no sense."""
    state = dict(before)
    for action in actions:
        match action:
            case Define(spec):
                assert spec not in state
                state[spec] = Installed(frozenset(), frozenset())
            case Enable(spec, instance):
                assert instance not in state[spec].enabled
                state[spec] = Installed(state[spec].enabled | {instance}, state[spec].touched | {instance})
            case Disable(spec, instance):
                assert instance in state[spec].enabled
                state[spec] = Installed(state[spec].enabled - {instance}, state[spec].touched)
            case Remove(spec):
                assert not state[spec].enabled
                assert not state[spec].touched, "this empties the rings it was enabled in"
                del state[spec]
    return state


def enabled(state: State) -> Wanted:
    return {spec: installed.enabled for spec, installed in state.items() if installed.enabled}


@given(WANTED, INSTALLED)
def test_changes_lead_to_what_is_wanted(wanted: Wanted, installed: State) -> None:
    after = carried_out(changes(wanted, installed), installed)
    assert enabled(after) == wanted
    assert changes(wanted, after) == []
    # what is neither wanted nor may still have records in a ring is gone
    assert all(spec in wanted or state.touched for spec, state in after.items())


@given(WANTED, INSTALLED)
def test_disarming_comes_first(wanted: Wanted, installed: State) -> None:
    arms = [isinstance(action, Define | Enable) for action in changes(wanted, installed)]
    assert arms == sorted(arms)


@given(WANTED, INSTALLED, st.data())
def test_undo_of_what_was_done_restores_what_is_armed(wanted: Wanted, installed: State, data: st.DataObject) -> None:
    arming = [action for action in changes(wanted, installed) if isinstance(action, Define | Enable)]
    done = arming[: data.draw(st.integers(0, len(arming)))]
    state = carried_out(done, installed)
    inverses = [inverse for action in reversed(done) if (inverse := undo(action)) is not None]
    assert len(inverses) == len(done)
    # an event that was enabled stays defined, since its removal would empty rings; the executor knows
    kept = {inverse.spec for inverse in inverses if isinstance(inverse, Remove) and state[inverse.spec].touched}
    after = carried_out(
        (inverse for inverse in inverses if inverse.spec not in kept or isinstance(inverse, Disable)), state
    )
    assert enabled(after) == enabled(installed)
    assert after.keys() - installed.keys() == kept


def test_disarming_has_no_undo() -> None:
    assert undo(Disable(SPECS[0], "a")) is None
    assert undo(Remove(SPECS[0])) is None


def test_event_stays_until_the_last_instance_it_touched_is_gone() -> None:
    (spec, *_) = SPECS
    state = carried_out(changes({spec: frozenset("ab")}, {}), {})
    state = carried_out(changes({}, state), state)
    assert state == {spec: Installed(frozenset(), frozenset("ab"))}
    assert changes({}, {spec: Installed(frozenset(), frozenset("b"))}) == []
    assert changes({}, {spec: Installed(frozenset(), frozenset())}) == [Remove(spec)]
