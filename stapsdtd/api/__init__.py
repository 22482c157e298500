"""The gRPC face of the daemon: protobuf types end here.

servicer   one method for each RPC; work on subscriptions is handed to the control thread
stream     a subscription's log into messages
convert    model -> protobuf
errors     this package's errors -> gRPC codes
server     listening: lock, socket, health, reflection
"""
