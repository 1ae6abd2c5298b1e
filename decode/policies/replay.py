"""Makes the choices of a log of records, so that a rejection-coupled text comes out again."""

from collections.abc import Iterable, Mapping, Sequence

from decode.types import OFF, Choice, PolicySession, Request, StepRecord


class Replay:
    """Answers each request from its own records; with the same noise the text is the same."""

    def __init__(self, records: Iterable[StepRecord]) -> None:
        self._choices: dict[str, list[Choice]] = {}
        for record in sorted(records, key=lambda r: (r.request_id, r.step)):
            choice = Choice(record.drafter, record.num_draft_tokens, "replay")
            self._choices.setdefault(record.request_id, []).append(choice)

    def open(self, request: Request) -> PolicySession:
        """The request's log. Raises ValueError where there is none."""
        if request.request_id not in self._choices:
            raise ValueError(
                f"the log holds no request {request.request_id}; replay with the prompts and "
                "request_ids that it was recorded with"
            )
        return ReplaySession(self._choices[request.request_id])


class ReplaySession:
    """Walks one log. Where a step is queued before the end of the text is seen, one choice more
    than the log holds is asked for, of which nothing is kept.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._step = 0

    def choose(self, offers: Mapping[str, int]) -> Choice:
        step, self._step = self._step, self._step + 1
        if step >= len(self._choices):
            return Choice(OFF, 0, "the log has ended")
        choice = self._choices[step]
        if choice.drafter != OFF and offers.get(choice.drafter, 0) < choice.num_draft_tokens:
            raise ValueError(
                f"step {step} of the log drafts {choice.num_draft_tokens} tokens with "
                f"{choice.drafter}, which offers {offers.get(choice.drafter, 0)} now; "
                "replay with the drafters of its recording"
            )
        return choice

    def learn(self, record: StepRecord) -> None:
        if record.step >= len(self._choices):
            raise ValueError(
                f"the log ends after {len(self._choices)} steps; replay with the settings of its "
                "recording"
            )
