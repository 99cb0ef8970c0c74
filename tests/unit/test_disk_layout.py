from hypothesis import given
from hypothesis import strategies as st

from services.kv_store.disk.layout import Form, Spot, neighbours

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
def test_neighbours_name_each_spot_once_and_a_layer_of_them_is_one_piece(
    data: st.DataObject, form: Form
) -> None:
    places = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), unique=True))
    spots = [Spot(number, slot, form) for number, slot in places]
    groups = neighbours(spots)
    assert sorted(member for members in groups for member in members) == list(range(len(spots)))
    for members in groups:
        number, slot, _ = spots[members[0]]
        for column, member in enumerate(members):
            assert spots[member].segment == number
            for layer in range(form.num_layers):
                begin = form.offset_of(slot, layer) + column * form.layer_bytes
                assert form.offset_of(spots[member].slot, layer) == begin


def test_a_whole_stripe_is_one_group_whose_layers_follow_one_another() -> None:
    form = Form(3, 100, 4)
    assert neighbours([Spot(7, slot, form) for slot in (6, 4, 7, 5)]) == [[1, 3, 0, 2]]
    assert [form.offset_of(4, layer) for layer in range(3)] == [1200, 1600, 2000]


def test_neighbours_in_two_stripes_are_two_groups() -> None:
    form = Form(1, 10, 2)
    assert neighbours([Spot(0, slot, form) for slot in (1, 2)]) == [[0], [1]]
