"""Tests what we report about ranks from the files they left.

The files are hand-made, or whatever else a folder may contain.
"""

import json
import os
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross import cli
from jaxcross.report import event_files
from jaxcross.report.event_files import read_event_files
from jaxcross.report.post_mortem import first_to_end, ranks_without_file
from tests.support.examples import scaled

RUN = "h0 1 1"


def header(rank, size=4, **other):
    return {
        "jaxcross": 1,
        "run": RUN,
        "rank": rank,
        "size": size,
        "host": "h0",
        "pid": 100 + rank,
        "time": 1e9,
        "at": 0,
        **other,
    }


def begin(token, at_s, what, job="", step=0, segment=-1, number=0):
    return {
        "begin": token,
        "at": int(at_s * 1e9),
        "what": what,
        "job": job,
        "step": step,
        "segment": segment,
        "number": number,
    }


def end(token, at_s):
    return {"end": token, "at": int(at_s * 1e9)}


def beat(at_s):
    return {"beat": 1, "at": int(at_s * 1e9)}


def ended_as(how, at_s, text="", lost=(), activity=""):
    return {
        "exit": how,
        "at": int(at_s * 1e9),
        "text": text,
        "lost": list(lost),
        "activity": activity,
    }


def write(folder, rank, *events, size=4, name="rank-{}.jsonl", **other):
    lines = [json.dumps(line) for line in (header(rank, size, **other), *events)]
    (folder / name.format(rank)).write_text("\n".join(lines) + "\n")


EXCHANGE = {"what": "exchange", "job": "b", "step": 14, "segment": 3}


def test_who_is_reported_gone_ended_first(tmp_path):
    gone = "rank 2 is gone: its process 102 on host `h0` ended without a word."
    for rank in (0, 1, 3):
        say = ended_as("reported", 12, gone, [2]) if rank == 1 else ended_as("aborted", 12.1, gone)
        write(tmp_path, rank, begin(1, 10, **EXCHANGE, number=5), say)
    write(tmp_path, 2, begin(1, 9, **EXCHANGE | {"what": "compute", "segment": 2}), beat(10.5))
    assert first_to_end(read_event_files(tmp_path)) == (
        "Rank 2 ended first, without a word (killed, crashed, or out of memory), in job 'b', step "
        "14, segment 2 (compute). Ranks 0, 1, 3 waited in job 'b', step 14, segment 3 (exchange)."
    )


def test_rank_that_did_not_arrive_is_named(tmp_path):
    """The launcher has terminated all ranks."""
    for rank in range(4):
        late = rank == 2
        first = begin(1, 9, "vote", number=7), end(1, 9.1)
        write(
            tmp_path,
            rank,
            *first,
            begin(2, 10, "compute", "b", 14, 2) if late else begin(2, 10, **EXCHANGE, number=8),
        )
    assert first_to_end(read_event_files(tmp_path)) == (
        "Rank 2 had not reached the operation in which the others waited, in job 'b', step 14, "
        "segment 2 (compute). Ranks 0, 1, 3 waited in job 'b', step 14, segment 3 (exchange)."
    )


def test_heartbeats_tell_who_ended_first(tmp_path):
    """All ranks were in the same exchange."""
    for rank in range(4):
        write(tmp_path, rank, begin(1, 10, **EXCHANGE, number=8), beat(11 if rank == 3 else 20))
    assert first_to_end(read_event_files(tmp_path)).startswith("Rank 3 ended first, without a word")


def test_nothing_is_made_up_where_nothing_is_known(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, begin(1, 10, **EXCHANGE, number=8), beat(20))
    text = first_to_end(read_event_files(tmp_path))
    assert text.startswith(
        "All ranks ended without a word within two seconds, after the same number of exchanges, so"
    )
    assert text.endswith("Ranks 0, 1, 2, 3 waited in job 'b', step 14, segment 3 (exchange).")


def test_an_exception_is_quoted_with_its_place(tmp_path):
    place = "in job 'b', step 14, segment 3 (exchange)"
    for rank in range(3):
        write(
            tmp_path,
            rank,
            begin(1, 10, **EXCHANGE, number=8),
            ended_as("aborted", 11, "because of rank 3"),
        )
    write(tmp_path, 3, ended_as("failed", 10.5, "rank 3 failed with ValueError: x", activity=place))
    assert first_to_end(read_event_files(tmp_path)).startswith(
        f"Rank 3 ended first (rank 3 failed with ValueError: x), {place}. Ranks 0,"
    )


def test_a_rank_that_left_too_early(tmp_path):
    write(tmp_path, 0, begin(1, 10, **EXCHANGE, number=8), beat(20), size=2)
    write(
        tmp_path,
        1,
        begin(1, 9, "vote", number=7),
        end(1, 9.1),
        ended_as("left", 9.2, "its script ended"),
        size=2,
    )
    assert first_to_end(read_event_files(tmp_path)).startswith(
        "Rank 1 left first (its script ended), outside of any step. Rank 0 waited"
    )


def test_a_good_end_and_a_stop(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, ended_as("left", 5), size=2)
    assert (
        first_to_end(read_event_files(tmp_path))
        == "All ranks ended normally: their scripts finished."
    )
    for rank in range(2):
        write(tmp_path, rank, ended_as("terminated", 5 + rank, "SIGTERM"), size=2)
    assert first_to_end(read_event_files(tmp_path)).startswith("Rank 0 ended first (SIGTERM)")


def test_place_of_a_rank_between_segments(tmp_path):
    write(
        tmp_path,
        0,
        begin(1, 1, "compute", "a", 3, 0),
        end(1, 2),
        begin(2, 3, "vote", number=1),
        size=1,
    )
    assert (
        read_event_files(tmp_path)[0].place == "in vote, after job 'a', step 3, segment 0 (compute)"
    )
    write(tmp_path, 0, begin(1, 1, "compute", "a", 3, 0), begin(2, 3, "vote", number=1), size=1)
    assert (
        read_event_files(tmp_path)[0].place
        == "in vote, alongside job 'a', step 3, segment 0 (compute)"
    )


def test_every_activity_of_a_dead_rank_is_named(tmp_path):
    exchange, write_out = (
        begin(1, 1, "exchange", "a", 4, 1, number=9),
        begin(2, 2, "checkpoint", "b", 3),
    )
    write(tmp_path, 0, exchange, write_out, beat(3), size=2)
    write(tmp_path, 1, begin(1, 1, "vote", number=9), beat(9), size=2)
    assert (
        ", in job 'a', step 4, segment 1 (exchange), alongside job 'b', step 3 (checkpoint). "
        in first_to_end(read_event_files(tmp_path))
    )
    write(
        tmp_path,
        0,
        begin(1, 1, "vote", number=9),
        write_out,
        begin(3, 1, "compute", "a", 5, 0),
        beat(3),
        size=2,
    )
    beside = (
        "in vote, alongside job 'b', step 3 (checkpoint) and job 'a', step 5, segment 0 (compute)"
    )
    assert f", {beside}. " in first_to_end(read_event_files(tmp_path))


def test_job_in_its_own_code_is_named_alongside_another_jobs_exchange(tmp_path):
    """A rank that's killed in one job's code, e.g. by the kernel, may have been waiting in another
    job's exchange.
    """
    ended = [begin(n, n, "compute", job, 40 + n, 0) for n, job in enumerate("abc")]
    ended += [end(n, n + 0.5) for n in range(3)]
    over = {"note": "done: ended", "job": "c", "step": 42, "at": 3}
    write(tmp_path, 0, *ended, over, begin(9, 4, "replicas", "b", 41, number=9), beat(5), size=2)
    write(tmp_path, 1, begin(1, 4, "replicas", "b", 41, number=9), beat(20), size=2)
    assert first_to_end(read_event_files(tmp_path)) == (
        "Rank 0 ended first, without a word (killed, crashed, or out of memory), in job 'b', step "
        "41 (replicas), alongside job 'a' after step 40 (compute). Rank 1 waited in job 'b', step "
        "41 (replicas)."
    )


def test_torn_last_line_is_normal_others_are_counted(tmp_path):
    """Unreadable lines are counted, but a torn last line is normal."""
    write(tmp_path, 0, begin(1, 10, **EXCHANGE, number=8), size=1)
    with (tmp_path / "rank-0.jsonl").open("a") as stream:
        stream.write('nonsense\n[]\n{"begin":2,"at":"x"}\n{"begin":3,"at":1100')
    (record,) = read_event_files(tmp_path)
    assert (record.unread, list(record.under_way)) == (3, [1])


def test_a_file_that_follows_another_one(tmp_path):
    write(
        tmp_path,
        0,
        begin(1, 1, "vote", number=41),
        begin(2, 2, "compute", "a", 1, 0),
        size=1,
        name="rank-{}.old.jsonl",
    )
    write(tmp_path, 0, begin(1, 1, "vote", number=41), beat(9), size=1)
    (record,) = read_event_files(tmp_path)
    assert (list(record.under_way), record.entered, record.last_s) == ([1], 41, 1e9 + 9)


def test_files_of_another_run_are_left_out(tmp_path):
    write(tmp_path, 0, begin(1, 1, "vote", number=1), size=2)
    write(tmp_path, 0, begin(1, 1, "vote", number=99), size=2, name="rank-{}.old.jsonl", pid=7)
    write(tmp_path, 1, beat(1), size=2, run="h0 9 9", time=5e8)
    (record,) = records = read_event_files(tmp_path)
    assert (record.rank, record.entered, ranks_without_file(records)) == (0, 1, [1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty: its rank was killed at its start, or the disk was full."),
        ('{"jaxcross": 1, "ru', "does not begin as an event file of version 1 does"),
    ],
)
def test_a_file_without_a_head_is_skipped_with_a_line(tmp_path, capsys, text, reason):
    gone = "rank 1 is gone: its process 101 on host `h0` ended without a word."
    write(
        tmp_path, 0, begin(1, 10, **EXCHANGE, number=5), ended_as("reported", 12, gone, [1]), size=3
    )
    (tmp_path / "rank-1.jsonl").write_text(text)
    assert cli.main(["doctor", "--post-mortem", str(tmp_path)]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert f"The events of rank 1 are skipped. `{tmp_path / 'rank-1.jsonl'}` {reason}" in lines
    assert "No file of ranks 2:" in lines
    assert (
        "Rank 1 ended first, without a word (killed, crashed, or out of memory); its events cannot "
        "be read." in lines
    )


def test_a_folder_without_event_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"`{tmp_path}` holds no event files"):
        read_event_files(tmp_path)


@pytest.mark.parametrize(
    "first",
    [
        b"\n",
        b"[]\n",
        b'{"jaxcross": 2, "time": 1, "at": 1}\n',
        b'{"jaxcross":1,"time":NaN,"at":0}\n',
    ],
)
def test_another_version_is_refused(tmp_path, first):
    (tmp_path / "rank-0.jsonl").write_bytes(first)
    with pytest.raises(ValueError, match="does not begin as an event file of version 1 does"):
        read_event_files(tmp_path)


def test_neither_links_nor_pipes_are_read(tmp_path):
    os.mkfifo(tmp_path / "rank-0.jsonl")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_event_files(tmp_path)
    (tmp_path / "rank-0.jsonl").unlink()
    (tmp_path / "rank-0.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic link"):
        read_event_files(tmp_path)


def test_of_a_huge_file_the_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(event_files, "MOST_BYTES", 2000)
    write(tmp_path, 0, *(begin(n, n, "vote", number=n) for n in range(1, 1000)), size=1)
    (record,) = read_event_files(tmp_path)
    assert record.entered == 999
    assert len(record.under_way) < 30


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
names = st.sampled_from(
    [
        "begin",
        "end",
        "at",
        "what",
        "job",
        "step",
        "segment",
        "number",
        "exit",
        "activity",
        "text",
        "lost",
        "script_raised",
        "beat",
    ]
)
lines = st.dictionaries(names, values, max_size=6).map(
    lambda d: json.dumps(d).encode()
) | st.binary(max_size=40)


@settings(max_examples=scaled(80), deadline=None)
@given(
    head=st.fixed_dictionaries({}, optional=dict.fromkeys(header(0), values)),
    events=st.lists(lines, max_size=6),
)
def test_whatever_a_file_holds(tmp_path_factory, head, events):
    folder = tmp_path_factory.mktemp("fuzz")
    text = json.dumps({**header(0), **head}).encode()
    (folder / "rank-0.jsonl").write_bytes(b"\n".join([text, *events]))
    with suppress(ValueError):  # the header may be invalid
        records = read_event_files(folder)
        assert first_to_end(records)
        assert ranks_without_file(records) == list(
            range(1, min(records[0].size, event_files.MOST_RANKS))
        )


def test_the_command(tmp_path, capsys):
    write(
        tmp_path,
        0,
        begin(1, 10, "exchange", "[red]b", 14, 3, number=8),
        ended_as("failed", 11, "no \x1b[2J luck"),
        size=2,
    )
    assert cli.main(["doctor", "--post-mortem", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "Rank 0 ended first (no [2J luck), in job '[red]b', step 14, segment 3 (exchange)." in shown
    )
    assert "No file of ranks 1:" in shown
    assert cli.main(["doctor", "--post-mortem", str(tmp_path / "none")]) == 1
    assert "jaxcross doctor: " in capsys.readouterr().err
