from types import SimpleNamespace

from rankxform.planning.reads import Costs
from rankxform.planning.simulate import Workload
from rankxform.planning.store_requests import StoreRequests
from rankxform.planning.upload_parts import UploadMemory

MIB = 1 << 20
LOADS = SimpleNamespace(workloads=[Workload(read=80 * MIB, reads=3), Workload(read=MIB, reads=7)])
REQUESTS = StoreRequests.of(LOADS, [100 * MIB, 100], UploadMemory(128 * MIB, 8 * MIB))


def test_ranges_are_divided_and_files_sent_in_parts():
    assert REQUESTS.reads == 3 + 10 + 7
    assert REQUESTS.writes == 12 + 1 + 2 * 3 + 8


def test_what_they_take_follows_from_what_is_given():
    costs = Costs(get_rate=10, put_rate=2, get_price=1e5, put_price=2e5)
    assert REQUESTS.seconds(costs) == 27 / 2
    assert REQUESTS.price(costs) == 20 * 0.1 + 27 * 0.2
    assert REQUESTS.in_words(costs) == (
        "at most 20 to read, about 27 to write; they cost 7.40; 14 s at the rates of one prefix"
    )


def test_what_is_not_given_is_not_said():
    assert REQUESTS.in_words(Costs()) == "at most 20 to read, about 27 to write"
    assert StoreRequests(0, 5).in_words(None) == "about 5 to write"
    assert "they cost under 0.01" in REQUESTS.in_words(Costs(get_price=1))


def test_prices_say_nothing_of_processes():
    assert Costs(get_price=1).of_stores_alone
    assert not Costs().of_stores_alone and not Costs(get_price=1, read=2e9).of_stores_alone
