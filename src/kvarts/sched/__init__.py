"""Who runs, who waits, who is preempted: from what is known, a plan for the next step."""
