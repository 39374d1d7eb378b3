#!lua flags=allow-oom
-- Moves a batch to another state: a compare-and-set. A batch that was cancelled before it could begin does not begin.
-- One that is over expires, and with it goes what only its steps used: also the results of lines that nobody
-- collected, which may still be of use when it goes on after a failure. The index goes with the last of them.
--
-- KEYS  batch, done stream, index of batches
-- ARGV  to ('' to stay), ttl_s ('0' unless the new state is an end), uncollected_ttl_s,
--       what these names begin with: records, states of its lines, results of its lines,
--       number of states it may come from, these,
--       then fields (name, value) that are set with it; a value 'now+<ms>' is the server's time and so much more
-- reply the state afterwards: `to` if it moved
local batch, done, index = KEYS[1], KEYS[2], KEYS[3]
local to, ttl_s, uncollected_ttl_s = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local records, requests, results, num_from = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])

-- include: ending.lua

local found = redis.call('HMGET', batch, 'state', 'cancel_requested')
local state, moves = found[1], false
for i = 8, 7 + num_from do
  moves = moves or ARGV[i] == state
end
if not moves then
  return state or ''
end
if to == '' then
  to = state
elseif to == 'in_progress' and found[2] == '1' then
  to = 'cancelling'
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', batch, 'state', to)
for i = 8 + num_from, #ARGV, 2 do
  local later_ms = string.match(ARGV[i + 1], '^now%+(%d+)$')
  redis.call('HSET', batch, ARGV[i], later_ms and now_ms + later_ms or ARGV[i + 1])
end
if ttl_s == 0 then
  redis.call('PERSIST', batch) -- one that failed may go on
  redis.call('PERSIST', index)
  return to
end
redis.call('EXPIRE', batch, ttl_s)
for _, entry in ipairs(redis.call('XRANGE', done, '-', '+')) do
  redis.call('EXPIRE', requests .. entry[2][2], uncollected_ttl_s)
  redis.call('EXPIRE', results .. entry[2][2], uncollected_ttl_s)
end
redis.call('DEL', done)
for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
  local other = redis.call('HGET', records .. id, 'state')
  if other and not BATCH_OVER[other] then
    return to
  end
end
redis.call('EXPIRE', index, ttl_s)
return to
