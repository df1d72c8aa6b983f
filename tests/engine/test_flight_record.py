"""What a dead core was computing, read from the file it leaves."""

from octavo.engine.flight_record import FlightRecorder, read_in_flight
from octavo.types.sampling_params import SamplingParams
from octavo.types.step import NewRow, SchedulerOutput

NAMES = ["a", "b", "c", "d" * 1000]


def step(step_id: int, rows: list[int], new: dict[int, str] | None = None) -> SchedulerOutput:
    new_rows = [NewRow(row, name, [1], 1, 0, SamplingParams(), [], [[]]) for row, name in (new or {}).items()]
    return SchedulerOutput(step_id, [], new_rows, [], rows, [1] * len(rows), [True] * len(rows), len(rows))


def test_a_full_disk_costs_the_record_and_not_the_core(tmp_path):
    path = tmp_path / "flight"
    path.symlink_to("/dev/full")
    recorder = FlightRecorder(path, 4)
    recorder.begin(step(0, [0], {0: "a"}))
    assert read_in_flight(path, NAMES) == set()
    FlightRecorder(path, 2000)
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 8 * 8000  # no hole that a full disk could not fill


def test_what_began_and_did_not_end_is_in_flight(tmp_path):
    path = tmp_path / "flight"
    assert read_in_flight(path, NAMES) == set()
    recorder = FlightRecorder(path, 4)
    assert read_in_flight(path, NAMES) == set()
    first, second = step(0, [0, 3], {0: "a", 3: "d" * 1000}), step(1, [3, 1], {1: "b"})
    recorder.begin(first)
    assert read_in_flight(path, NAMES) == {"a", "d" * 1000}
    recorder.begin(second)
    assert read_in_flight(path, NAMES) == {"a", "b", "d" * 1000}
    recorder.end(first)
    assert read_in_flight(path, NAMES) == {"b", "d" * 1000}
    assert read_in_flight(path, ["b"]) == {"b"}
    recorder.end(second)
    assert read_in_flight(path, NAMES) == set()


def test_a_row_belongs_to_who_took_it_last(tmp_path):
    recorder = FlightRecorder(tmp_path / "flight", 1)
    recorder.begin(step(0, [0], {0: "a"}))
    recorder.end(step(0, [0]))
    recorder.begin(step(9, [0], {0: "b"}))
    assert read_in_flight(tmp_path / "flight", NAMES) == {"b"}
