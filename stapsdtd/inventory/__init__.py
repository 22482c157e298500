"""The files with probes that are installed, whether or not a process maps them.

    walking (a process) ──► walk: new files, known ones ──► parsed in the sandbox ──► Index ──► subscriptions, lists
            ▲                                                                          │
            └── DirectoryWatches (inotify): a directory changed                        └──► store, across restarts

A file is known by its fingerprint, of path, device, inode, size and times: one that has not changed is not read again.
The index says which probes a file has, not where; whoever wants them has it opened and parsed anew, with their rights.
"""
