"""Files are parsed in processes that can do nothing else: a file that gets the better of a parser gets nothing.

    daemon                        zygote                             worker
    parser.SandboxedParser ─────► worker.serve: drops all rights,
                                  never sees a file ────fork───────► lockdown.confine
         descriptor of a file ─────────────────────────────────────► parse ──► protocol.encode
         protocol.decode ◄─────────────────────────────────────────── answer
           └─► model.ParsedObject

What a worker says is as hostile as the file it read: `codec` holds it to the types of the model and `protocol` to the
file, so that only what `elf` could have found gets through. And `parser` never shows one worker the files of two
owners. When the daemon goes, however it goes, the zygote finds its socket closed and ends, and the kernel kills the
workers with it.
"""
