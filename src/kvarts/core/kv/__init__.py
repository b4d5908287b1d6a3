"""KV memory: the content of pages, the requests that reference them, and the order in which pages are evicted.

`cache.py` is the interface that other rooms call. Two caches implement it:

    page_cache      whole pages: every layer keeps every token
      tree            which pages can be found
      eviction        runs of pages, and which is evicted next
    group_pages     parts of pages: groups of layers keep different tokens
      run_cache       sequences, and the runs of parts that they hold
      runs            runs of parts, the spans in which they are found, the streams of what windows release
      account         used, cached and empty bytes; the list of runs that nothing holds; events
      span_tree       which runs can be found, and from which prefix every group can resume
      decodes         what decodes take and release in a step, and in many steps at once
      group_needs     the memory that a request needs

`groups.py` describes the groups of a model, `pool.py` owns empty pages, and `transfer.py` has the values that name a
copy between tiers.
"""
