#!lua flags=allow-oom
-- Cancels a request: guarantees that it has a terminal entry afterwards, written here or before, and that every
-- later commit for it is refused. Its entry in a work stream stays until somebody claims it and is told so.
--
-- KEYS  request, results, finished log
-- ARGV  request id, prefix of its chunks' names, terminal, result_ttl_s, max_finished
-- reply 'cancelled' | 'ended' | 'unknown'
local request, results, finished = KEYS[1], KEYS[2], KEYS[3]
local id, chunks_prefix, terminal, result_ttl_s, max_finished = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

-- include: ending.lua

local state = redis.call('HMGET', request, 'state', 'attempt')
if not state[1] then
  return 'unknown'
end
if ENDED[state[1]] then
  return 'ended'
end
local attempt = state[2] or '0'
end_request({ id = id, request = request, results = results, chunks = chunks_prefix .. attempt, attempt = attempt },
  terminal, 'cancelled', finished, result_ttl_s, max_finished)
return 'cancelled'
