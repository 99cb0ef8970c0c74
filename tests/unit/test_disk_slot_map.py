import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv_store.disk.layout import Place
from services.kv_store.disk.slot_map import SlotMap, entry_bytes

CAP_BYTES = 8 << 20
SEGMENT_BYTES = 512 << 10
BUFFER_BYTES = 64 << 10
SHAPES = [(2, 3000), (30, 1000), (4, 200_000)]
PAGE_BYTES = 4096


def new_map() -> SlotMap:
    return SlotMap(CAP_BYTES, SEGMENT_BYTES, BUFFER_BYTES)


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(SHAPES), st.just(0.0), st.integers(1, 400)),
        st.tuples(st.none(), st.floats(0, 1), st.integers(1, 300)),
    ),
    max_size=25,
)


@given(steps)
def test_no_place_is_given_twice_and_all_stays_within_the_cap(
    steps: list[tuple[tuple[int, int] | None, float, int]],
) -> None:
    """A step takes places of a shape, or frees some from a share of those held on."""
    slots, held = new_map(), dict[Place, tuple[int, int]]()
    for shape, share, number in steps:
        if shape is not None:
            places = slots.allocate(min(number, slots.num_allocatable(shape)), shape)
            assert held.keys().isdisjoint(places)
            assert len(set(places)) == len(places)
            held |= dict.fromkeys(places, shape)
        else:
            start = int(share * len(held))
            gone = list(held)[start : start + number]
            emptied = slots.free(gone)
            for place in gone:
                del held[place]
            assert {number for number, _ in emptied}.isdisjoint(number for number, _ in held)
        assert slots.num_blocks == len(held)
        assert slots.num_used_bytes == sum(layers * size for layers, size in held.values())
        assert slots.segments.keys() == {number for number, _ in held}
        assert all(slots.is_taken(place) for place in held)
        assert slots.num_charged_bytes <= CAP_BYTES + len(slots.segments) * PAGE_BYTES
        assert slots.num_file_bytes == sum(segment.file_bytes for segment in slots.segments.values())


@given(st.sampled_from(SHAPES), st.data())
def test_what_is_restored_takes_the_same_places_and_leaves_the_same_free(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    before = new_map()
    places = before.allocate(min(before.num_allocatable(shape), 200), shape)
    gone = data.draw(st.sets(st.sampled_from(places), max_size=len(places) - 1))
    before.free(gone)
    after = new_map()
    kept = set(places) - gone
    for number, segment in before.segments.items():
        after.restore(number, segment.form, {slot for other, slot in kept if other == number})
    assert all(after.is_taken(place) for place in kept)
    assert not any(after.is_taken(place) for place in gone)
    assert after.num_blocks == before.num_blocks
    more = after.allocate(after.num_allocatable(shape), shape)
    assert kept.isdisjoint(more)


def test_blocks_taken_together_are_neighbours() -> None:
    slots = SlotMap(256 << 20, 64 << 20, BUFFER_BYTES)
    assert slots.allocate(32, (30, 12288)) == [(0, slot) for slot in range(32)]


def test_a_stripe_that_is_free_whole_is_taken_before_scattered_slots() -> None:
    slots = SlotMap(256 << 20, 64 << 20, BUFFER_BYTES)
    slots.allocate(96, (30, 12288))
    slots.free([(0, 1), (0, 5), *((0, slot) for slot in range(32, 64))])
    assert slots.allocate(32, (30, 12288)) == [(0, slot) for slot in range(32, 64)]


def test_a_segments_number_is_never_given_again() -> None:
    slots = new_map()
    first = slots.allocate(3, (2, 3000))
    assert slots.free(first) == [(0, slots.allocate(1, (2, 3000)) and slots.form_of(1))]
    slots.skip_to(9)
    slots.free([(1, 0)])
    assert slots.allocate(1, (2, 3000)) == [(9, 0)]


def test_another_shape_gets_room_only_when_files_have_gone() -> None:
    slots = new_map()
    places = slots.allocate(slots.num_allocatable((2, 3000)), (2, 3000))
    assert slots.num_allocatable((4, 200_000)) == 0
    slots.free(places[::2])
    assert slots.num_allocatable((4, 200_000)) == 0
    slots.free(places[1::2])
    assert slots.num_allocatable((4, 200_000)) > 0


def test_an_index_larger_than_planned_leaves_less_room() -> None:
    slots = new_map()
    room = slots.num_allocatable((2, 3000))
    slots.num_index_bytes = CAP_BYTES // 2
    assert slots.num_allocatable((2, 3000)) < room
    slots.num_index_bytes = CAP_BYTES
    assert slots.num_allocatable((2, 3000)) == 0


@pytest.mark.parametrize("num_layers", [1, 30, 80])
def test_an_entrys_plan_covers_its_record_with_room_to_spare(num_layers: int) -> None:
    assert entry_bytes((num_layers, 4096)) > 2 * (16 + 16 + 50 + 8 * num_layers)
