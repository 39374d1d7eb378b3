-- Shared by the scripts that need a claim; the loader puts it where they say `-- include: held.lua`.
--
-- A claim is `nonce`, or `nonce:commit:numbers` after transactions without ack were made under it.
-- held() is the fence: the entry carries this nonce, and is pending for this consumer. After XGROUP DESTROY
-- the claim is still there but nothing is pending, and the entry will be delivered again: not held. Returns the claim, or nil.
local function same_claim(claim, nonce)
  return claim and (claim == nonce or string.sub(claim, 1, #nonce + 1) == nonce .. ':')
end

local function held(stream, claims, group, id, nonce, consumer)
  local claim = redis.call('HGET', claims, id)
  if not same_claim(claim, nonce) then
    return nil
  end
  local pending = redis.pcall('XPENDING', stream, group, id, id, 1, consumer)
  return pending.err == nil and #pending == 1 and claim or nil
end

-- Makes an entry claimable at once, without counting the delivery.
local function release(stream, claims, tries, group, id, handback)
  redis.call('XCLAIM', stream, group, handback, 0, id, 'JUSTID')
  redis.call('HDEL', claims, id)
  redis.call('HINCRBY', tries, id, -1)
end

-- Ends an entry. Acknowledging alone would leave it in memory for ever.
local function drop(stream, claims, tries, group, id)
  redis.call('XACK', stream, group, id)
  redis.call('XDEL', stream, id)
  redis.call('HDEL', claims, id)
  redis.call('HDEL', tries, id)
end
