"""What happens to a request to a job whose run is just starting."""

from jaxcross.errors import JobError
from jaxcross.jobs import lifecycle
from jaxcross.jobs.lifecycle import JobLifecycle
from tests.support.interleavings import interrupted


class Driver:
    """Records the requests it receives."""

    def __init__(self):
        self.requests = []

    def request(self, record, request):
        self.requests.append((record, request))


class Record:
    """A stand-in for the driver's record of a job."""


def test_request_while_a_run_begins_is_not_lost():
    """At any point of a starting run, it reaches the run, or raises since there's no run yet."""
    inside, at, outcomes = True, 0, set()
    while inside:
        at += 1
        life, driver, record = JobLifecycle("a"), Driver(), Record()

        def request(life=life):
            try:
                life.request("stop")
            except JobError:
                return "refused"
            return "passed on"

        def begin(life=life, driver=driver, record=record):
            life.attach(None, driver, record, None)

        outcome, inside = interrupted(request, at, begin, module=lifecycle)
        assert driver.requests == ([(record, "stop")] if outcome == "passed on" else []), (
            f"before bytecode {at}"
        )
        outcomes.add(outcome)
    assert outcomes == {"refused", "passed on"}
