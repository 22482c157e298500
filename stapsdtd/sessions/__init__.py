"""From the engine to the clients.

EventSink.deliver: quota, fairness ──► EventLog: sequence numbers, bounded ──► api.stream
Registry changes ──► Subscriptions: which sites each one wants ──► Engine.arm / disarm
"""
