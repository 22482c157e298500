"""Planning: pure functions from (wanted, installed) to changes. Nothing here does I/O.

bpf       attachments.changes: groups of sites to attach, to widen and to detach ──► capture.bpf.groups
          values.united: what one record of a site holds
ftrace    events.group_sites: sites as tracefs events; fetch: their arguments
          steps.changes: Define, Enable, Disable, Remove ──► capture.ftrace.executor
"""
