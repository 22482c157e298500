"""The daemon's gRPC interface. Protobuf types do not leave this package.

server        the gRPC server with health and reflection, and the relay in front of it
listeners     the listening sockets, bound or inherited
relay         passes connections on to the gRPC server, knowing each one's peer
opening       the HTTP/2 frames that the relay follows to apply its timeouts
access        peers, roles, rights, and the gate that every call passes
servicer      one method per RPC; work on subscriptions is handed to the control thread
stream        one Stream call: a subscription's log as messages
rows          events as Rows messages
columns       events as Columns messages
wire          protobuf's wire format, which these two write by hand
watch         one WatchProbes call: the registry's changes as messages
convert       the model to protobuf, and requests to the model
cgroup_scope  the cgroups and containers that a request names
errors        errors to gRPC status codes
"""
