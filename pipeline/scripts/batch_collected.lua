#!lua flags=allow-oom
-- Acknowledges lines whose results are on the disk: guarantees that each is counted once, and that what the
-- server holds for it goes away soon. When nothing is missing any more the batch moves on to finalizing.
--
-- KEYS  batch, done stream, then for each line: request, results
-- ARGV  ttl_s, number of lines, then for each: entry id, 'succeeded' | 'failed' | 'dropped', prompt tokens,
--       output tokens
-- reply the state of the batch
local batch, done, ttl_s = KEYS[1], KEYS[2], ARGV[1]
for i = 1, tonumber(ARGV[2]) do
  local a, k = 4 * i - 1, 2 * i + 1
  if redis.call('XDEL', done, ARGV[a]) == 1 then
    redis.call('HINCRBY', batch, 'collected', 1)
    if ARGV[a + 1] ~= 'dropped' then
      redis.call('HINCRBY', batch, ARGV[a + 1], 1)
    end
    redis.call('HINCRBY', batch, 'prompt_tokens', ARGV[a + 2])
    redis.call('HINCRBY', batch, 'output_tokens', ARGV[a + 3])
    redis.call('EXPIRE', KEYS[k], ttl_s)
    redis.call('EXPIRE', KEYS[k + 1], ttl_s)
  end
end
local f = redis.call('HMGET', batch, 'state', 'admitted', 'collected', 'cursor', 'total')
local state, admitted, collected = f[1], tonumber(f[2] or '0'), tonumber(f[3] or '0')
local all_fed = tonumber(f[4] or '0') == tonumber(f[5] or '0')
if admitted ~= collected then
  return state or ''
end
local ending = nil
if state == 'in_progress' and all_fed then
  ending = 'completed'
elseif state == 'cancelling' then
  ending = 'cancelled'
elseif state == 'expiring' then
  ending = 'expired'
end
if ending then
  redis.call('HSET', batch, 'state', 'finalizing', 'ending', ending)
  return 'finalizing'
end
return state or ''
