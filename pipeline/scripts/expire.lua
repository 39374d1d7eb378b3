#!lua flags=allow-oom
-- Ends requests whose deadline has passed: guarantees that each of them has a terminal entry afterwards, written here
-- or before, that nothing follows it, and that the index keeps no request that is not known any more. What is due is
-- decided by the server's clock, which also set the deadlines.
--
-- KEYS  deadlines, finished log
-- ARGV  what these names begin with: states of requests, results, chunks; terminal, result_ttl_s, max_finished, limit
-- reply { ids of the requests that were ended, ids of those whose keys are not what they should be }
local deadlines, finished = KEYS[1], KEYS[2]
local requests, results, chunks = ARGV[1], ARGV[2], ARGV[3]
local terminal, result_ttl_s, max_finished, limit = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

-- include: ending.lua

local function expire(id)
  local request = requests .. id
  local found = redis.call('HMGET', request, 'state', 'attempt')
  if not found[1] or ENDED[found[1]] then
    return false
  end
  local attempt = found[2] or '0'
  end_request({ id = id, request = request, results = results .. id, chunks = chunks .. id .. ':' .. attempt,
    attempt = attempt }, terminal, 'failed', finished, result_ttl_s, max_finished)
  return true
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local ended, damaged = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now_ms, 'LIMIT', 0, limit)) do
  -- First: a foreign key under one of its names must not keep the others behind it waiting for ever.
  redis.call('ZREM', deadlines, id)
  local ok, was_open = pcall(expire, id)
  if not ok then
    damaged[#damaged + 1] = id
  elseif was_open then
    ended[#ended + 1] = id
  end
end
return { ended, damaged }
