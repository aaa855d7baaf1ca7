from __future__ import annotations

import threading

from inflight.tritonserver.reply import Reply
from tests.fakes.fake_pb_utils import InferenceResponse, ResponseSender, TritonModelException


def test_finish_happens_once() -> None:
    sender = ResponseSender()
    reply = Reply(sender)
    assert reply.send(InferenceResponse())
    assert reply.finish(InferenceResponse())
    assert not reply.finish(InferenceResponse())
    assert not reply.send(InferenceResponse())
    assert [send.is_final for send in sender.sends] == [False, True]
    assert reply.is_finished


def test_a_send_that_fails_is_reported_and_not_tried_again() -> None:
    sender = ResponseSender()
    reply = Reply(sender)
    sender.fail_with = TritonModelException("gone")
    assert not reply.send(InferenceResponse())
    sender.fail_with = None
    assert not reply.send(InferenceResponse())
    assert sender.sends == []


def test_a_broken_reply_still_releases_its_request() -> None:
    sender = ResponseSender()
    reply = Reply(sender)
    sender.fail_with = TritonModelException("gone")
    reply.send(InferenceResponse())
    sender.fail_with = None
    assert not reply.finish(InferenceResponse())
    (only,) = sender.sends
    assert only.is_final and only.response is None


def test_nothing_raises_when_nothing_can_be_sent() -> None:
    sender = ResponseSender()
    sender.fail_with = TritonModelException("gone")
    reply = Reply(sender)
    assert not reply.finish(InferenceResponse())
    assert sender.sends == [] and reply.is_finished


def test_a_finished_reply_asks_nobody_about_cancellation() -> None:
    sender = ResponseSender()
    reply = Reply(sender)
    assert not reply.is_client_gone()
    sender.cancelled = True
    assert reply.is_client_gone()
    reply.finish(InferenceResponse())
    assert not reply.is_client_gone()


def test_many_threads_finish_once() -> None:
    sender = ResponseSender()
    reply = Reply(sender)
    start = threading.Barrier(8)
    won = []

    def finish() -> None:
        start.wait()
        won.append(reply.finish(InferenceResponse()))

    threads = [threading.Thread(target=finish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert len(sender.sends) == 1
