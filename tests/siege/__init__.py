"""Two users of one daemon: an attacker, and a bystander whose work must not suffer. `./dev siege --help`.

    __main__   the rows of a run, how long each takes, and the exit status
    siege      a daemon, the two users' processes, and what a row measures
    report     a row held against the quiet baseline, and the table
    bystander  the process that works: info, list, subscribe, stream, count
    attacker   the process that attacks: one attack of the modules named below, for so many seconds
    arena      what an attack works with

    costly     requests that take long to parse, type and look up; malformed and forbidden ones
    catalogue  many probes, many sites, and selectors that match none of them
    frames     HTTP/2 as no client that means well speaks it
    hits       floods, long strings, filters of them, large aggregations, readers that stall
    sessions   subscriptions, connections, watches and streams that come and go
    processes  mappings, forks, scopes of thousands, the provider socket

The attacker keeps to one processor: what slows the bystander down is then the daemon's doing rather than a want of
processors, which no daemon can cure.
"""
