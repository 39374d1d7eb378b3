#!lua flags=allow-oom
-- Admits one request: guarantees that its state and its entry in the tokenizer's stream appear together, that
-- an id is accepted once, and that the door is closed while max_queue requests of this priority are in front
-- of prefill, or the server's memory is filled to a part that leaves room for what is inside. So it needs no
-- refusal by the server at the limit itself, and what was accepted before is known as such even there.
--
-- KEYS  request, tokenizer stream, prefill stream, index of deadlines (may be left out where there is no timeout)
-- ARGV  ticket (names this call, so that sending it again is not taken for a second request), max_queue, payload,
--       attempt of the payload ('0' where none is given): larger than that of any request before under this id, so
--       that entries of that one which are still in a stream are refused; timeout_ms ('0' where none is given):
--       the request is given up so long after it was accepted
-- reply 'accepted' | 'exists' | 'busy'
local request, tokenizer, prefill, deadlines = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local ticket, max_queue, payload = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local attempt, timeout_ms = ARGV[4] or '0', tonumber(ARGV[5] or '0')

-- include: door.lua

if timeout_ms > 0 and not deadlines then
  return redis.error_reply('ERR a timeout needs the key of the index of deadlines')
end
if redis.call('EXISTS', request) == 1 then
  local known = redis.call('HGET', request, 'ticket')
  if known then
    -- Written once more: who waits for the disk (WAITAOF) waits for what its own connection wrote, and the first
    -- writing was on another one, which was lost.
    redis.call('HSET', request, 'ticket', known)
  end
  return known == ticket and 'accepted' or 'exists'
end
if is_closed(tokenizer, prefill, max_queue) then
  return 'busy'
end
redis.call('HSET', request, 'state', 'queued', 'attempt', attempt, 'n', '0', 'ticket', ticket)
limit_time(request, deadlines, timeout_ms)
redis.call('XADD', tokenizer, '*', 'p', payload)
return 'accepted'
