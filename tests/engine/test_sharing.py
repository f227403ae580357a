import threading
import time

from exssnet.engine.cuda.sharing import holding_gpu, releasing_gpu


def test_only_one_thread_holds_the_lock_and_releases_it_while_it_waits():
    inside, most, lent = [], [], []

    def work():
        for _ in range(20):
            with holding_gpu():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()
                with releasing_gpu():
                    lent.append(1)
                    time.sleep(0.0005)
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(lent) == 80


def test_a_thread_that_never_asked_for_the_lock_does_not_wait_for_one_that_holds_it():
    passed = threading.Event()

    def alone():
        with releasing_gpu():
            passed.set()

    with holding_gpu():
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join(60)
        assert passed.is_set()
        assert not thread.is_alive()


def test_a_lock_that_is_released_can_be_taken_and_comes_back():
    order, lent, done = [], threading.Event(), threading.Event()

    def other():
        lent.wait(60)
        with holding_gpu():
            order.append("other")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with holding_gpu():
        order.append("before")
        with releasing_gpu():
            lent.set()
            assert done.wait(60)
        order.append("after")
        done.clear()
        late = threading.Thread(target=other)
        late.start()
        assert not done.wait(0.05)  # it holds the lock again
        order.append("last")
    late.join(60)
    thread.join(60)
    assert order == ["before", "other", "after", "last", "other"]
