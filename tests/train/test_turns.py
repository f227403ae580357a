import threading
import time

from exssnet.train.turns import lending_the_turn, taking_turns


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


def test_a_thread_without_the_turn_is_not_held_up():
    with lending_the_turn():
        pass
    with taking_turns(), lending_the_turn(), taking_turns():
        pass
