"""Damages to a good timeline, each of which breaks one rule."""

from __future__ import annotations

from builders.body import Body

__all__ = ["DAMAGES", "allocated_is_wrong", "asking", "free_is_wrong", "quiet"]


def drop_key(body: Body) -> None:
    del body["block_size_tokens"]


def drop_field(body: Body) -> None:
    # The row after the one that is left out has nothing to be compared with.
    del body["timeline"][1]["active_seqs"]


def a_bool_for_a_number(body: Body) -> None:
    body["timeline"][1]["waiting"] = True


def a_negative_number(body: Body) -> None:
    body["timeline"][1]["allocated"] = -30


def no_positive_size(body: Body) -> None:
    body["block_size_tokens"] = 0


def free_is_wrong(body: Body) -> None:
    body["timeline"][0]["free_blocks"] += 1


def more_cached_than_free(body: Body) -> None:
    body["timeline"][1]["cached_blocks"] = 31


def pct_is_wrong(body: Body) -> None:
    body["timeline"][1]["used_pct"] += 1e-8


def peak_is_wrong(body: Body) -> None:
    body["peak_used_pct"] = 0.99


def count_is_wrong(body: Body) -> None:
    body["preemption_count"] = 2


def preempts_with_room(body: Body) -> None:
    body["timeline"][1]["preempted_seqs"] = 1
    body["preemption_count"] = 2


def preempts_what_would_fit(body: Body) -> None:
    asking(body)["asked"][0]["blocks"] = 2


def saw_less_than_there_was(body: Body) -> None:
    asking(body)["asked"][0]["free_blocks"] = 1


def asks_and_preempts_nobody(body: Body) -> None:
    body["timeline"][0]["asked"] = [{"request": "7", "blocks": 99, "free_blocks": 60}]


def preempts_more_than_it_says(body: Body) -> None:
    asking(body)["preempted_seqs"] += 5
    body["preemption_count"] += 5


def asks_for_more_than_there_is(body: Body) -> None:
    asking(body)["asked"][0]["blocks"] = 101


def withholds_more_than_there_is(body: Body) -> None:
    asking(body).update(withheld_blocks=10**9)


def withholds_what_is_used(body: Body) -> None:
    body["timeline"][2].update(withheld_blocks=51)


def fills_a_tier_beyond_its_size(body: Body) -> None:
    body["host_total_blocks"] = 50
    body["timeline"][2].update(host_used_blocks=20, host_cached_blocks=31)


def quiet(body: Body) -> Body:
    """Add a step in which nothing changes after the first."""
    first = body["timeline"][0]
    for row in body["timeline"][1:]:
        row["step"] += 1
    body["timeline"].insert(1, {**first, "step": 1, "t_ms": first["t_ms"] + 1, "allocated": 0, "freed": 0})
    return body


def a_quiet_step_is_there_twice(body: Body) -> None:
    body["timeline"].insert(1, dict(quiet(body)["timeline"][1]))


def a_rest_is_there_twice(body: Body) -> None:
    rest = body["timeline"][3]
    assert not rest["active_seqs"]
    body["timeline"].insert(4, {**rest, "freed": 0})


def a_quiet_step_is_missing(body: Body) -> None:
    del quiet(body)["timeline"][1]
    body["every"] = 1


def more_steps_are_missing_than_are_left_out(body: Body) -> None:
    for row in body["timeline"][1:]:
        row["step"] += 7
    body["every"] = 7


def asking(body: Body) -> Body:
    found: Body = next(row for row in body["timeline"] if row.get("asked"))
    return found


def step_goes_back(body: Body) -> None:
    body["timeline"][4]["step"] = 1


def time_goes_back(body: Body) -> None:
    body["timeline"][4]["t_ms"] = 5


def allocated_is_wrong(body: Body) -> None:
    body["timeline"][1]["allocated"] += 1


def the_first_row_does_not_begin_with_nothing(body: Body) -> None:
    body["timeline"][0]["allocated"] -= 1


def something_is_left(body: Body) -> None:
    rest, after = body["timeline"][3], body["timeline"][4]
    assert rest["active_seqs"] == 0
    rest.update(used_blocks=2, free_blocks=98, used_pct=0.02, freed=58)
    after["allocated"] -= 2


DAMAGES = [
    (drop_key, "schema"),
    (drop_field, "schema"),
    (a_bool_for_a_number, "schema"),
    (a_negative_number, "schema"),
    (no_positive_size, "schema"),
    (free_is_wrong, "block_conservation"),
    (more_cached_than_free, "block_conservation"),
    (pct_is_wrong, "used_pct_arithmetic"),
    (peak_is_wrong, "peak_consistency"),
    (count_is_wrong, "peak_consistency"),
    (preempts_with_room, "preemption_trigger"),
    (preempts_what_would_fit, "preemption_needed"),
    (saw_less_than_there_was, "preemption_needed"),
    (asks_and_preempts_nobody, "preemption_needed"),
    (preempts_more_than_it_says, "preemption_needed"),
    (asks_for_more_than_there_is, "preemption_needed"),
    (withholds_more_than_there_is, "block_conservation"),
    (withholds_what_is_used, "block_conservation"),
    (fills_a_tier_beyond_its_size, "block_conservation"),
    (a_quiet_step_is_there_twice, "step_order"),
    (a_rest_is_there_twice, "step_order"),
    (a_quiet_step_is_missing, "step_order"),
    (more_steps_are_missing_than_are_left_out, "step_order"),
    (step_goes_back, "step_order"),
    (time_goes_back, "step_order"),
    (allocated_is_wrong, "flux"),
    (the_first_row_does_not_begin_with_nothing, "flux"),
    (something_is_left, "leak"),
]
