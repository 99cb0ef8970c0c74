from hypothesis import given
from hypothesis import strategies as st

from services.kv_store.disk.layout import Form, Spot, extents_of

forms = st.builds(Form, st.integers(1, 5), st.integers(1, 9), st.integers(1, 6))


@given(forms, st.integers(1, 20))
def test_slots_share_no_byte_and_leave_no_gap(form: Form, num_stripes: int) -> None:
    num_slots = num_stripes * form.stripe_slots
    bytes_of_slots = [
        byte
        for slot in range(num_slots)
        for layer in range(form.num_layers)
        for byte in range(form.offset_of(slot, layer), form.offset_of(slot, layer) + form.layer_bytes)
    ]
    assert sorted(bytes_of_slots) == list(range(num_slots * form.slot_bytes))


@given(forms, st.integers(0, 50))
def test_a_file_that_reaches_a_slots_end_holds_all_of_the_slot(form: Form, slot: int) -> None:
    ends = [form.offset_of(slot, layer) + form.layer_bytes for layer in range(form.num_layers)]
    assert form.end_of(slot) == max(ends)


@given(st.data(), forms)
def test_extents_name_each_layer_of_each_spot_once_at_its_place(data: st.DataObject, form: Form) -> None:
    places = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), unique=True))
    layers = range(data.draw(st.integers(0, form.num_layers - 1)), form.num_layers)
    spots = [Spot(number, slot, form) for number, slot in places]
    seen: set[tuple[int, int]] = set()
    for extent in extents_of(spots, layers):
        assert extent.num_bytes == len(extent.members) * form.layer_bytes
        for column, member in enumerate(extent.members):
            number, slot, _ = spots[member]
            assert number == extent.segment
            assert form.offset_of(slot, extent.layer) == extent.offset + column * form.layer_bytes
            assert (member, extent.layer) not in seen
            seen.add((member, extent.layer))
    assert len(seen) == len(spots) * len(layers)


def test_a_layer_of_a_whole_stripe_is_one_extent_and_the_layers_follow_one_another() -> None:
    form = Form(3, 100, 4)
    extents = list(extents_of([Spot(7, slot, form) for slot in (6, 4, 7, 5)], range(3)))
    assert [(e.offset, e.num_bytes) for e in extents] == [(1200, 400), (1600, 400), (2000, 400)]
    assert extents[0].members == [1, 3, 0, 2]


def test_neighbours_in_two_stripes_are_two_extents() -> None:
    form = Form(1, 10, 2)
    extents = list(extents_of([Spot(0, slot, form) for slot in (1, 2)], range(1)))
    assert [extent.members for extent in extents] == [[0], [1]]
