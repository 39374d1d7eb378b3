#!lua
-- Makes the record of a batch: guarantees that one that exists is left as it is, whatever its state.
--
-- KEYS  batch, done stream, index of batches
-- ARGV  batch id, number of fields, then name and value of each
-- reply 1, or 0 if it exists
local batch, done, index = KEYS[1], KEYS[2], KEYS[3]
if redis.call('EXISTS', batch) == 1 then
  return 0
end
redis.call('DEL', done) -- lines of a record that was lost: they are fed again
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
for i = 1, tonumber(ARGV[2]) do
  redis.call('HSET', batch, ARGV[2 * i + 1], ARGV[2 * i + 2])
end
redis.call('HSET', batch, 'id', ARGV[1], 'state', 'validating', 'created_ms', now_ms)
redis.call('ZADD', index, now_ms, ARGV[1])
redis.call('PERSIST', index)
return 1
