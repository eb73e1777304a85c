"""What becomes of a request to a job whose run begins."""

from jaxcross.errors import JobError
from jaxcross.jobs import lifecycle
from jaxcross.jobs.lifecycle import JobLifecycle
from tests.support.interleavings import interrupted


class Driver:
    """Keeps what it is asked for."""

    def __init__(self):
        self.requests = []

    def request(self, record, request):
        self.requests.append((record, request))


class Record:
    """The driver's record of the job."""


def test_request_while_a_run_begins_is_not_lost():
    """It reaches the run, or raises because the run has not begun, at whatever point the run begins."""
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
        assert driver.requests == ([(record, "stop")] if outcome == "passed on" else []), f"before bytecode {at}"
        outcomes.add(outcome)
    assert outcomes == {"refused", "passed on"}
