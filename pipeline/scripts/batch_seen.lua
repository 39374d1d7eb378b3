#!lua flags=allow-oom
-- Notes that somebody who waited for a batch knows that it is over: guarantees that no record appears by it.
--
-- KEYS  batch
-- reply 1, or 0 if there is none
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[1], 'seen', '1')
return 1
