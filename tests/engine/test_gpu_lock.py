import threading
import time

from exssnet.engine.cuda.gpu_lock import lending_the_turn, taking_turns


def test_only_one_thread_has_the_turn_and_lends_it_while_it_waits():
    inside, most, lent = [], [], []

    def work():
        for _ in range(20):
            with taking_turns():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()
                with lending_the_turn():
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


def test_a_thread_that_never_asked_for_the_turn_is_not_held_up_by_one_that_has_it():
    passed = threading.Event()

    def alone():
        with lending_the_turn():
            passed.set()

    with taking_turns():
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join(60)
        assert passed.is_set()
        assert not thread.is_alive()


def test_a_turn_that_is_lent_can_be_taken_and_comes_back():
    order, lent, done = [], threading.Event(), threading.Event()

    def other():
        lent.wait(60)
        with taking_turns():
            order.append("other")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with taking_turns():
        order.append("before")
        with lending_the_turn():
            lent.set()
            assert done.wait(60)
        order.append("after")
        done.clear()
        late = threading.Thread(target=other)
        late.start()
        assert not done.wait(0.05)  # it has the turn again
        order.append("last")
    late.join(60)
    thread.join(60)
    assert order == ["before", "other", "after", "last", "other"]
