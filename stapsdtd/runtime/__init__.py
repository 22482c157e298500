"""What any daemon needs: mailboxes for threads, health checks, the service manager, logs."""
