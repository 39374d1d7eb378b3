#!lua flags=allow-oom
-- Moves a batch to another state: a compare-and-set. A batch that is over expires, and with it goes what only
-- its steps used.
--
-- KEYS  batch, done stream
-- ARGV  to, ttl_s ('0' unless the new state is an end), number of states it may come from, these, then fields
--       (name, value) that are set with it; the value 'now' of a field that ends in _ms is the server's time
-- reply the state afterwards: `to` if it moved
local batch, done, to, ttl_s, num_from = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local state = redis.call('HGET', batch, 'state')
local moves = false
for i = 4, 3 + num_from do
  moves = moves or ARGV[i] == state
end
if not moves then
  return state or ''
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', batch, 'state', to)
for i = 4 + num_from, #ARGV, 2 do
  local value = ARGV[i + 1]
  if value == 'now' and string.sub(ARGV[i], -3) == '_ms' then
    value = now_ms
  end
  redis.call('HSET', batch, ARGV[i], value)
end
redis.call('PERSIST', batch) -- one that failed may go on
if ttl_s > 0 then
  redis.call('EXPIRE', batch, ttl_s)
  redis.call('DEL', done)
end
return to
