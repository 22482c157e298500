"""From the engine to the clients.

Sink.deliver ──► Subscription: scope, sequence numbers ──► EventLog (bounded) ──► api.Stream
Registry changes ──► Subscriptions: which sites each one wants ──► Engine.arm / disarm
"""
