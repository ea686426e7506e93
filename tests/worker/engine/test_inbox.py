"""Payloads wait for the plan that joins them; the plan waits, not for ever, for its payloads."""

import threading

import pytest

from allspan.protos.api.errors import AlreadyExists, DeadlineExceeded, InternalError, QueueFull
from allspan.worker.engine.batch import inbox as inbox_module
from allspan.worker.engine.batch.inbox import Inbox
from support.cores import request


def test_a_plan_gets_the_payload_that_came_before_it():
    inbox, one = Inbox(4), request(1, [1])
    inbox.put(one)
    assert inbox.take(one.request_id, one.digest()) is one


def test_a_plan_waits_for_the_payload_that_comes_after_it():
    inbox, one = Inbox(4, timeout=10), request(1, [1])
    taken = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take(one.request_id, one.digest())))
    thread.start()
    inbox.put(one)
    thread.join(10)
    assert taken == [one]


def test_a_payload_that_never_comes_ends_the_wait_by_name():
    with pytest.raises(DeadlineExceeded, match=request(1, [1]).request_id.hex()):
        Inbox(4, timeout=0.01).take(request(1, [1]).request_id, 0)


def test_another_payload_under_the_same_id_is_refused():
    inbox = Inbox(4)
    inbox.put(request(1, [1]))
    with pytest.raises(InternalError, match="differs between this rank and the leader"):
        inbox.take(request(1, [2]).request_id, request(1, [2]).digest())


def test_an_id_in_use_and_a_full_inbox_are_refused():
    inbox = Inbox(2)
    inbox.put(request(1, [1]))
    with pytest.raises(AlreadyExists):
        inbox.put(request(1, [1]))
    inbox.put(request(2, [1]))
    with pytest.raises(QueueFull, match="2 requests"):
        inbox.put(request(3, [1]))
    inbox.drop(request(1, [1]).request_id)
    inbox.put(request(3, [1]))


def test_a_withdrawn_payload_is_there_for_a_plan_already_made():
    inbox, one = Inbox(4), request(1, [1])
    inbox.put(one)
    inbox.withdraw([one.request_id])
    assert inbox.take(one.request_id, one.digest()) is one
    assert len(inbox) == 1


def test_a_withdrawn_payload_that_no_plan_joins_is_forgotten(monkeypatch):
    monkeypatch.setattr(inbox_module, "WITHDRAWN_SECONDS", 0.0)
    inbox = Inbox(4)
    inbox.put(request(1, [1]))
    inbox.withdraw([request(1, [1]).request_id])
    assert len(inbox) == 0


def test_a_joined_payload_is_not_withdrawn(monkeypatch):
    monkeypatch.setattr(inbox_module, "WITHDRAWN_SECONDS", 0.0)
    inbox, one = Inbox(4), request(1, [1])
    inbox.put(one)
    inbox.take(one.request_id, one.digest())
    inbox.withdraw([one.request_id])
    assert len(inbox) == 1
    inbox.drop(one.request_id)
    assert len(inbox) == 0


def test_withdrawn_payloads_take_no_room_from_others():
    inbox = Inbox(2)
    for number in range(5):
        inbox.put(request(number, [1]))
        inbox.withdraw([request(number, [1]).request_id])
    inbox.put(request(5, [1]))
    inbox.put(request(6, [1]))
    with pytest.raises(QueueFull, match="2 requests"):
        inbox.put(request(7, [1]))
    with pytest.raises(QueueFull):
        inbox.put(request(0, [1]))


def test_of_many_withdrawn_payloads_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(inbox_module, "MOST_WITHDRAWN", 3)
    inbox = Inbox(2)
    for number in range(5):
        inbox.put(request(number, [1]))
        inbox.withdraw([request(number, [1]).request_id])
    assert len(inbox) == 3


def test_a_withdrawn_payload_can_be_sent_again_but_no_other_under_its_id():
    inbox, one = Inbox(4), request(1, [1])
    inbox.put(one)
    inbox.withdraw([one.request_id])
    with pytest.raises(AlreadyExists):
        inbox.put(request(1, [2]))
    inbox.put(request(1, [1]))
    with pytest.raises(AlreadyExists):
        inbox.put(request(1, [1]))
    assert inbox.take(one.request_id, one.digest()) is one


def test_a_retired_id_is_in_use_for_a_while(monkeypatch):
    inbox, one = Inbox(4), request(1, [1])
    inbox.retire(one.request_id)
    with pytest.raises(AlreadyExists, match="cancelled just now"):
        inbox.put(one)
    monkeypatch.setattr(inbox_module, "WITHDRAWN_SECONDS", 0.0)
    inbox.retire(one.request_id)
    inbox.put(one)


def test_dropping_and_withdrawing_what_is_not_there_is_no_error():
    inbox, one = Inbox(4), request(1, [1])
    inbox.drop(one.request_id)
    inbox.withdraw([one.request_id])
    inbox.put(one)
    assert inbox.take(one.request_id, one.digest()) is one
