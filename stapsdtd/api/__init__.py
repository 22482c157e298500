"""The daemon's gRPC interface. Protobuf types do not leave this package.

server        the gRPC server with health and reflection, and the relay in front of it
listeners     the listening sockets, bound or inherited
relay         passes connections on to the gRPC server
half          one end of a relayed connection
peers         who is at the other end of a connection
connections   how many connections are open, and how many may be
timeouts      how long a client may take to connect and to send its requests
http2         HTTP/2's frames and error codes
frames        reads the frames that clients send, before the gRPC server does
header_blocks the requests' headers, as far as the gRPC server does not survive them
frame_budget  how many frames and headers a client may send a second
access        roles, rights, and the gate that every call passes
admission     that gate, before a request's bytes are parsed
servicer      one method per RPC; work on subscriptions is handed to the control thread
backend       the parts of the daemon that the servicer uses
requests      requests, checked, to the model
listing       the probes and processes that a client may see
subscribers   who made which subscription, and who may use it
watches       the open WatchProbes calls, and their messages
watch         one WatchProbes call: the registry's changes, passed to the event loop
streams       the open Stream calls
stream        one Stream call: a subscription's log as messages
rows          events as Rows messages
columns       events as Columns messages
wire          protobuf's wire format, which these two write by hand
calls         what a call leaves to the control thread when it ends
convert       the model to protobuf
cgroup_scope  the cgroups and containers that a request names
errors        errors to gRPC status codes
"""
